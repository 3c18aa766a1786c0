"""Device profiles: the work of a step, its duration, and the fit of a profile to measured steps."""

from random import Random

import pytest

from kvferry.core.errors import UsageError
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine.schedule.step.step import ScheduledSequence
from kvferry.simulator.worker.decode_runs import DecodeRun
from kvferry.simulator.worker.device import DeviceProfile, LinkProfile, StepWork, work_of
from kvferry.simulator.worker.fitting import fit


def scheduled(computed: int, count: int) -> ScheduledSequence:
    return ScheduledSequence(RequestId("r"), [], 0, computed, count, [], 0, SamplingParams(), 0)


def test_work_counts_tokens_kv_tokens_and_pairs() -> None:
    # one decode after 99 tokens, and one chunk of 4 tokens after 10: its tokens attend to 11, 12, 13 and 14 tokens
    assert work_of([scheduled(99, 1), scheduled(10, 4)]) == StepWork(5, 114, 11 + 12 + 13 + 14)
    assert work_of([]) == StepWork(0, 0, 0)


def test_a_fit_finds_the_profile_of_the_steps() -> None:
    profile = DeviceProfile(step=0.006, token=4e-4, kv_token=3e-7, pair=2e-8)
    draw = Random(0)
    rows = []
    for _ in range(200):
        work = StepWork(draw.randrange(1, 600), draw.randrange(1, 20_000), draw.randrange(0, 200_000))
        rows.append((work, profile.seconds(work) * draw.uniform(0.99, 1.01)))
    found = fit(rows)
    for name in ("step", "token", "kv_token", "pair"):
        assert getattr(found.profile, name) == pytest.approx(getattr(profile, name), rel=0.05)
    assert found.median_error < 0.01
    assert found.num_steps == 200


def test_no_coefficient_is_negative() -> None:
    rows = [(StepWork(tokens, kv, 0), 0.01 + 1e-4 * tokens - 1e-8 * kv) for tokens in (1, 8, 64) for kv in (10, 1000)]
    found = fit(rows).profile
    assert found.kv_token == 0.0
    assert found.token == pytest.approx(1e-4, rel=0.02)


@pytest.mark.parametrize("rows", [[], [(StepWork(1, 1, 0), 0.0)] * 4, [(StepWork(1, 1, 0), float("nan"))] * 4])
def test_rows_that_determine_nothing_are_an_error(rows: list) -> None:
    with pytest.raises(UsageError):
        fit(rows)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: DeviceProfile(-1.0, 0.0, 0.0), "device.step must be between 0 and 3600 seconds, not -1.0"),
        (lambda: DeviceProfile(0.0, 0.0, 1e-9), "must take time"),
        (lambda: DeviceProfile(1.0, float("nan"), 0.0), "device.token must be between 0 and 3600 seconds, not nan"),
        (lambda: LinkProfile(bytes_per_second=0.0), "link.bytes_per_second must be between 1 and 1e15, not 0.0"),
        (lambda: LinkProfile(latency=-1.0), "link.latency must be between 0 and 60 seconds, not -1.0"),
    ],
)
def test_invalid_profiles_are_refused_by_name(make: object, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        make()


def test_a_run_is_cut_after_the_step_that_is_running() -> None:
    profile = DeviceProfile(step=1.0, token=0.0, kv_token=0.0)
    run = DecodeRun(10.0, 2, 100, 5, profile)
    assert run.ends == [11.0, 12.0, 13.0, 14.0, 15.0]
    assert run.cut(12.5)
    assert run.ends == [11.0, 12.0, 13.0]
    assert run.gaps() == [1.0, 1.0]
    assert not run.cut(12.6)
    assert run.cut(11.0)
    assert run.end == 11.0


def test_a_fit_keeps_a_fixed_time_or_a_time_per_token() -> None:
    works = [StepWork(tokens=1, kv_tokens=kv, pairs=kv) for kv in (100, 200, 300, 400, 500)]
    fitted = fit([(work, 1e-6 * work.kv_tokens - 5e-5) for work in works]).profile
    assert fitted.step > 0 or fitted.token > 0
