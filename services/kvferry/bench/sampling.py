"""Measures several actions alternately, for a fair comparison on a shared machine."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvferry.core.clock import Clock


@dataclass(frozen=True, slots=True)
class Sample:
    """Median and range of the durations of an action, in seconds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, seconds: list[float]) -> "Sample":
        """Compute the median and range of `seconds`."""
        return cls(statistics.median(seconds), min(seconds), max(seconds))


def alternate(
    actions: Mapping[str, Callable[[], None]],
    *,
    rounds: int,
    clock: Clock,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, Sample]:
    """Run all actions once per round (A B A B ...), after a warm-up round.

    Args:
        actions: actions by name.
        rounds: number of measured rounds.
        clock: clock of the measurement.
        on_round: called after each round, the warm-up round included.

    Returns:
        Durations of each action in seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name, action in actions.items():
            begun = clock.monotonic()
            action()
            if number:
                seconds[name].append(clock.monotonic() - begun)
        on_round()
    return {name: Sample.of(found) for name, found in seconds.items()}
