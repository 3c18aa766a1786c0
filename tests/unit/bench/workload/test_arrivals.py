"""Arrival times: the mean rate of every process, and the differences between the processes."""

import itertools
import math
import statistics
from random import Random

import pytest

from kvferry.bench.workload.arrivals import PROCESSES, Arrivals
from kvferry.core.errors import UsageError


@pytest.mark.parametrize("process", PROCESSES)
def test_every_process_has_its_mean_rate_and_ascending_times(process: str) -> None:
    times = Arrivals(process, rate=4.0, burstiness=0.5).times(8000, Random(1))
    assert times[0] == 0.0
    assert times == sorted(times)
    assert 8000 / times[-1] == pytest.approx(4.0, rel=0.05)


def test_an_infinite_rate_is_all_at_once() -> None:
    assert Arrivals(rate=math.inf).times(3, Random(1)) == [0.0, 0.0, 0.0]


def variation(arrivals: Arrivals) -> float:
    """Return the coefficient of variation of the gaps: 1 for a Poisson process."""
    times = arrivals.times(8000, Random(2))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return statistics.pstdev(gaps) / statistics.fmean(gaps)


def test_arrival_processes_have_their_variation() -> None:
    assert variation(Arrivals("constant", 4.0)) == pytest.approx(0.0, abs=1e-6)
    assert variation(Arrivals("poisson", 4.0)) == pytest.approx(1.0, rel=0.05)
    assert variation(Arrivals("gamma", 4.0, burstiness=0.25)) == pytest.approx(2.0, rel=0.1)
    assert variation(Arrivals("gamma", 4.0, burstiness=4.0)) == pytest.approx(0.5, rel=0.1)
    assert variation(Arrivals("burst", 4.0, burst_size=16)) > 3.0


def test_bursts_come_in_groups() -> None:
    assert Arrivals("burst", 2.0, burst_size=2).times(5, Random(0)) == [0.0, 0.0, 1.0, 1.0, 2.0]


def test_a_ramp_reaches_twice_the_mean_rate() -> None:
    times = Arrivals("ramp", 10.0).times(1000, Random(0))
    assert sum(time > 90.0 for time in times) == pytest.approx(2 * 10.0 * 10.0 * 0.95, rel=0.05)
    assert sum(time < 10.0 for time in times) == pytest.approx(10.0, abs=1)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"process": "weekly"}, "arrivals"),
        ({"rate": 0.0}, "rate"),
        ({"rate": -1.0}, "rate"),
        ({"rate": math.nan}, "rate"),
        ({"burstiness": 0.0}, "burstiness"),
        ({"burstiness": math.inf}, "burstiness"),
        ({"burst_size": 0}, "burst_size"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(changes: dict[str, object], field: str) -> None:
    with pytest.raises(UsageError) as caught:
        Arrivals(**changes)  # type: ignore[arg-type]
    assert caught.value.field == field
