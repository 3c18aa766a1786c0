"""Times actions on a device with cold caches, and measures peak copy and matrix product rates.

Before each run, a buffer as large as the largest cache is written. CUDA events around the replay of a graph exclude
host overhead, as in a captured step.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from kvferry.bench.formulas.gpu_work import GpuTiming, Rates

Action = Callable[[], torch.Tensor]
"""A function to be timed, which returns the result of an operation."""
_FLUSH_BYTES = 256 << 20
_COPY_BYTES = 1 << 30
_SIDE = 8192
_WARM_UPS = 3


class Timer(Protocol):
    """Measures the duration of an action. A protocol, because Triton's interpreter has no CUDA events, so that its
    tests use the host's clock."""

    def __call__(self, action: Action) -> GpuTiming:
        """Run `action` repeatedly and return statistics of its durations."""
        ...


class CudaTimer:
    """Timer that uses CUDA events."""

    def __init__(self, device: torch.device, *, seconds: float = 0.25, min_runs: int = 10, max_runs: int = 200) -> None:
        """
        Args:
            device: a GPU.
            seconds: total time of an action's runs in seconds, without the cache flushes.
            min_runs: minimum number of runs.
            max_runs: maximum number of runs.
        """
        self._device, self._seconds, self._min_runs, self._max_runs = device, seconds, min_runs, max_runs
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def __call__(self, action: Action) -> GpuTiming:
        """Run `action` repeatedly and return statistics of its durations."""
        run = self._captured(action)
        first = self._timed(run, 2)[-1]
        return GpuTiming.of(
            self._timed(run, min(self._max_runs, max(self._min_runs, int(self._seconds / max(first, 1e-6)))))
        )

    def _captured(self, action: Action) -> Callable[[], object]:
        """Return a function that replays the action's CUDA graph, or the action itself if it cannot be captured."""
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
        except RuntimeError:  # the action synchronizes with the device
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
    """Measure the peak rates of a device: a copy and a square matrix product.

    The copy is made twice: by torch's `copy_`, which a captured graph may replay on the copy engine, and by a kernel of
    additions. The faster one is the rate: on an H200 the copy engine reached 2.8 TB/s and the kernel 4.2 TB/s.

    Args:
        device: the device.
        timer: timer for the device.
        dtype: data type of the product.
        copy_bytes: size of the copy, a multiple of 4; each byte is read and written.
        side: rows and columns of the matrices.
    """
    source = torch.ones(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    read, written = source.view(torch.float32), target.view(torch.float32)
    actions: tuple[Action, ...] = (lambda: target.copy_(source), lambda: torch.add(read, 1.0, out=written))
    copied = min(timer(action).median for action in actions)
    # Random values, since constant matrices use less power and allow higher clocks.
    square = torch.randn(side, side, dtype=dtype, device=device)
    out = torch.empty_like(square)
    multiplied = timer(lambda: torch.mm(square, square, out=out)).median
    return Rates(2 * copy_bytes / copied / 1e9, 2 * side**3 / multiplied / 1e12)
