"""Timer that needs no GPU."""

from kvferry.bench.formulas.gpu_work import GpuTiming
from kvferry.bench.gpu.timing import Action
from kvferry.core.clock import Clock


class HostTimer:
    """`Timer` that uses the host's clock, for Triton's interpreter."""

    def __init__(self, clock: Clock, rounds: int) -> None:
        self._clock, self._rounds = clock, rounds

    def __call__(self, action: Action) -> GpuTiming:
        """Run `action` repeatedly and return statistics of its durations."""
        action()
        seconds: list[float] = []
        for _ in range(self._rounds):
            begun = self._clock.monotonic()
            action()
            seconds.append(self._clock.monotonic() - begun)
        return GpuTiming.of(seconds)
