from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import Unavailable
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SampledToken, SamplingParams
from kvferry.gateway.decide.config import RetryConfig
from kvferry.gateway.decide.lifecycle.sample_run import SampleRun
from kvferry.serving.request import Caller, Request


def run(seed: int = 1, max_tokens: int = 5) -> SampleRun:
    params = SamplingParams(max_tokens=max_tokens, seed=seed)
    return SampleRun(Request(Caller(RequestId("r"), arrived=10.0), (1, 2), params))


def test_a_token_clears_failures_and_counts_a_resumption():
    one = run()
    one.emit((SampledToken(7),), None, 12.0)
    one.failed(Unavailable("x"), "a:1")
    one.failed(Unavailable("x"), None)
    assert (one.failures, one.excluded) == (2, {"a:1"})
    one.emit((SampledToken(8),), None, 13.0)
    assert (one.failures, one.excluded, one.timing.resumed) == (0, set(), 1)
    assert one.timing.first_token_seconds == 2.0
    assert list(one.token_ids) == [1, 2, 7, 8]


def test_a_failure_before_the_first_token_is_no_resumption():
    one = run()
    one.failed(Unavailable("x"), "a:1")
    one.emit((SampledToken(7),), None, 12.0)
    assert one.timing.resumed == 0


def test_a_trip_is_complete_with_its_last_token():
    one = run(max_tokens=2)
    one.emit((SampledToken(7),), None, 12.0)
    assert not one.is_complete
    one.emit((SampledToken(8),), None, 12.0)
    assert one.is_complete


@given(st.integers(1, 10_000), st.integers(0, 1 << 40))
def test_waits_double_up_to_a_bound_and_the_first_is_none_if_there_is_another_worker(failures, seed):
    config = RetryConfig(first_backoff_seconds=0.1, max_backoff_seconds=2.0)
    one = run(seed)
    one.failures = failures
    whole = min(2.0, 0.1 * 2.0 ** min(failures - 1, 100))
    assert 0.5 * whole <= one.backoff_seconds(config, elsewhere=False) <= whole
    assert (one.backoff_seconds(config, elsewhere=True) == 0) == (failures == 1)
