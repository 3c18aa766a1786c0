"""Tokens on their way from the device to the host, beside the computation.

computes     ──step n──┬───────── step n+1 ──
                       │ event
copies                 └─ tokens ─ event          the host waits for that event when it wants them, not before
"""

from dataclasses import dataclass

import torch

_SLOTS = 2
"""Steps whose tokens may be on their way at once."""


@dataclass(slots=True, eq=False)
class Arrival:
    """Some numbers that a step sends."""

    _host: torch.Tensor
    _event: torch.cuda.Event | None
    """`None`: they are here."""

    def read(self) -> list[int]:
        """The numbers; waits for them."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host.tolist()


class Outbox:
    """Copies of one device's tokens. Calls from the thread that launches its steps."""

    def __init__(self, device: torch.device, most: int) -> None:
        """
        Args:
            device: where tokens are drawn.
            most: of one step.
        """
        is_cuda = device.type == "cuda"
        self._device = device
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._host = torch.zeros(_SLOTS, most, dtype=torch.int64, pin_memory=is_cuda)
        self._turn = 0
        self._copied: torch.cuda.Event | None = None

    def send(self, tokens: torch.Tensor) -> Arrival:
        """Begin to copy [R] int64, drawn by what has been launched so far. Before the one after the next is sent, this
        one must be read."""
        self._turn = (self._turn + 1) % _SLOTS
        host = self._host[self._turn, : len(tokens)]
        if self._stream is None:
            host.copy_(tokens)
            return Arrival(host, None)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(tokens, non_blocking=True)
            tokens.record_stream(self._stream)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(self._stream)
        return Arrival(host, self._copied)

    def before_next_step(self) -> None:
        """What is launched from now on may write where tokens were sent from."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
