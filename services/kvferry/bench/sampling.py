"""Timing two things fairly on a machine that others use too: alternately, medians, ranges."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvferry.core.clock import Clock


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one thing, over all rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, seconds: list[float]) -> "Sample":
        """The figures of these."""
        return cls(statistics.median(seconds), min(seconds), max(seconds))


def alternate(
    actions: Mapping[str, Callable[[], None]],
    *,
    rounds: int,
    clock: Clock,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, Sample]:
    """Run all actions once per round, in turn (A B A B), after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name, action in actions.items():
            begun = clock.monotonic()
            action()
            if number:
                seconds[name].append(clock.monotonic() - begun)
        on_round()
    return {name: Sample.of(found) for name, found in seconds.items()}
