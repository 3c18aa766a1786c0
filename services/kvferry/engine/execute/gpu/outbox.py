"""Asynchronous copies of sampled tokens from the device to pinned host memory, on a separate stream.

computes     ──step n──┬───────── step n+1 ──
                       │ event
copies                 └─ tokens ─ event          the host waits for that event only when it needs the tokens
"""

from dataclasses import dataclass

import torch

_SLOTS = 2
"""Maximum number of steps whose token copies are in flight."""


@dataclass(slots=True, eq=False)
class PendingTokens:
    """Tokens of one step that are being copied to the host."""

    _host: torch.Tensor
    _event: torch.cuda.Event | None
    """Event recorded after the copy; `None` if the copy is already complete."""

    def read(self) -> list[int]:
        """Wait for the copy and return the token ids."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host.tolist()


class Outbox:
    """Copier of sampled tokens from one device to the host. Use it on the thread that launches the device's steps."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        """
        Args:
            device: the device on which tokens are sampled.
            capacity: initial capacity of the buffers in tokens per step; they grow for larger steps.
        """
        is_cuda = device.type == "cuda"
        self._device = device
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._host = torch.zeros(_SLOTS, capacity, dtype=torch.int64, pin_memory=is_cuda)
        self._turn = 0
        self._copied: torch.cuda.Event | None = None

    def send(self, tokens: torch.Tensor) -> PendingTokens:
        """Start an asynchronous copy of [R] int64 token ids, ordered after the launches so far.

        Read the result before the second call after this one, which reuses its buffer.
        """
        if len(tokens) > self._host.shape[1]:  # several rows per sequence; copies in flight keep their buffers
            self._host = torch.zeros(_SLOTS, len(tokens), dtype=torch.int64, pin_memory=self._stream is not None)
        self._turn = (self._turn + 1) % _SLOTS
        host = self._host[self._turn, : len(tokens)]
        if self._stream is None:
            host.copy_(tokens)
            return PendingTokens(host, None)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(tokens, non_blocking=True)
            tokens.record_stream(self._stream)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(self._stream)
        return PendingTokens(host, self._copied)

    def before_next_step(self) -> None:
        """Make later launches wait for the copies, since they may overwrite the tokens on the device."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
