"""How long a device takes over an action, and how fast it copies and multiplies at most.

Each run begins with a cold cache: as much as the largest cache holds is written before it. Events around a replay of
a captured graph leave out the host, which a step whose launches are captured does not wait for either.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from kvferry.bench.gpu.work import Rates, Timing
from kvferry.core.clock import Clock

Action = Callable[[], torch.Tensor]
"""Something to time, with its result."""
_FLUSH_BYTES = 256 << 20
_COPY_BYTES = 1 << 30
_SIDE = 8192
_WARM_UPS = 3


class Timer(Protocol):
    """Runs an action often enough."""

    def __call__(self, action: Action) -> Timing:
        """How long it took."""
        ...


class HostTimer:
    """By a clock of the host: for Triton's interpreter, whose speed says nothing."""

    def __init__(self, clock: Clock, rounds: int) -> None:
        self._clock, self._rounds = clock, rounds

    def __call__(self, action: Action) -> Timing:
        """See `Timer`."""
        action()
        seconds: list[float] = []
        for _ in range(self._rounds):
            begun = self._clock.monotonic()
            action()
            seconds.append(self._clock.monotonic() - begun)
        return Timing.of(seconds)


class CudaTimer:
    """By events of the device."""

    def __init__(self, device: torch.device, *, seconds: float = 0.25, least: int = 10, most: int = 200) -> None:
        """
        Args:
            device: a GPU.
            seconds: what one action's runs may take together, the writing between them left out.
            least: runs, whatever they take.
            most: runs.
        """
        self._device, self._seconds, self._least, self._most = device, seconds, least, most
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def __call__(self, action: Action) -> Timing:
        """See `Timer`."""
        run = self._captured(action)
        first = self._timed(run, 2)[-1]
        return Timing.of(self._timed(run, min(self._most, max(self._least, int(self._seconds / max(first, 1e-6))))))

    def _captured(self, action: Action) -> Callable[[], object]:
        """A replay of the action's launches; the action itself where these cannot be captured."""
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                action()
        torch.cuda.current_stream(self._device).wait_stream(side)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                action()
        except RuntimeError:  # it asks the device for something on its way
            torch.cuda.synchronize(self._device)
            return action
        return graph.replay

    def _timed(self, run: Callable[[], object], count: int) -> list[float]:
        pairs = [(self._event(), self._event()) for _ in range(count)]
        for begun, ended in pairs:
            self._flush.zero_()
            begun.record()
            run()
            ended.record()
        torch.cuda.synchronize(self._device)
        return [begun.elapsed_time(ended) / 1e3 for begun, ended in pairs]

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def rates_of(
    device: torch.device,
    timer: Timer,
    *,
    dtype: torch.dtype = torch.bfloat16,
    copy_bytes: int = _COPY_BYTES,
    side: int = _SIDE,
) -> Rates:
    """What the device does at most: a copy and a square matrix product.

    Args:
        device: which.
        timer: for it.
        dtype: of the product.
        copy_bytes: of the copy, each read and written.
        side: of the matrices.
    """
    source = torch.ones(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = timer(lambda: target.copy_(source)).median
    square = torch.randn(side, side, dtype=dtype, device=device)  # ones would cost less power, and so clock higher
    out = torch.empty_like(square)
    multiplied = timer(lambda: torch.mm(square, square, out=out)).median
    return Rates(2 * copy_bytes / copied / 1e9, 2 * side**3 / multiplied / 1e12)
