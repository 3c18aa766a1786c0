"""Launches that are recorded once and replayed at once: what can do that, and a GPU's own way.

A recorded action launches the same kernels with the same addresses and sizes whenever it is replayed. So it takes its
inputs from memory that stays where it is, and must not ask the device for anything while it is recorded.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

Launch = Callable[[], None]
_WARM_UPS = 2
"""What compiles kernels or asks for memory on first use cannot be recorded."""


class Graphs(Protocol):
    """Records actions. Replays of one recorder must not overlap: their scratch memory is the same."""

    def capture(self, launch: Launch) -> Launch:
        """Run an action at least once, and give what repeats its launches."""
        ...


class CudaGraphs:
    """Recorded by the driver, all in one pool of memory: take the largest first, and the others fit into its room."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, launch: Launch) -> Launch:
        """See `Graphs`.

        Raises:
            RuntimeError: there is no memory left, or the action asked the device for something.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                launch()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Not by `torch.cuda.graph`, which collects garbage and empties torch's store of memory each time: captures go
        # on between the tokens of running requests.
        with torch.cuda.stream(self._stream):
            # Other threads of the process may copy pages meanwhile; only this one must not.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                launch()
            except BaseException:
                with suppress(RuntimeError):  # of a recording that is void anyway; why it is, is the launch's to say
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay
