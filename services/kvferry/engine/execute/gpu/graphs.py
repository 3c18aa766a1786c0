"""Graph capture, interface and CUDA implementation: records kernel launches once and replays them with one call.

A replay launches the same kernels with the same addresses and sizes, so a captured action reads its inputs from static
memory and must not synchronize with the device during capture.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

Launch = Callable[[], None]
_WARM_UPS = 2
"""Number of warm-up runs before capture, since kernel compilation and first-use allocations cannot be captured."""


class Graphs(Protocol):
    """Interface that captures kernel launches. Replays of one instance must not overlap, since they share scratch
    memory. A protocol, because captured steps are also checked without a GPU, by a recorder of launches."""

    def capture(self, launch: Launch) -> Launch:
        """Run `launch` at least once and capture its kernel launches; return a function that replays them."""
        ...


class CudaGraphs:
    """CUDA graphs that share one memory pool. Capture the largest graph first, so that the others fit into the pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, launch: Launch) -> Launch:
        """See `Graphs`.

        Raises:
            RuntimeError: out of memory, or `launch` synchronized with the device.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                launch()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # `torch.cuda.graph` would run the garbage collector and empty torch's memory cache each time, which is too slow
        # for captures between the steps of running requests.
        with torch.cuda.stream(self._stream):
            # Thread-local mode: other threads of the process may copy pages during the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                launch()
            except BaseException:
                with suppress(RuntimeError):  # the capture has already failed; the launch's error is raised
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay
