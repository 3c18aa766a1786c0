"""The statistics of an engine: exact times of a request's phases under a clock that the test moves."""

import pytest
from harness.fakes.engines import a_request, an_engine, small_limits
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.clock import ManualClock
from kvferry.core.histogram import Histogram


def test_phases_of_a_request() -> None:
    clock = ManualClock()
    engine, _ = an_engine(limits=small_limits(max_num_seqs=1))
    engine._clock = clock
    engine.add(a_request("first", [1, 2], max_tokens=3))
    engine.add(a_request("second", [1, 2, 3], max_tokens=1))
    for _ in range(4):
        clock.advance(1.0)
        engine.step()
    found = engine.statistics
    assert (found.num_steps, found.num_finished, found.num_open) == (4, 2, 0)
    assert (found.num_prompt_tokens, found.num_output_tokens) == (5, 4)
    assert (found.queue_seconds.count, found.queue_seconds.total) == (2, 1.0 + 4.0)
    assert (found.first_token_seconds.count, found.first_token_seconds.total) == (2, 1.0 + 4.0)
    assert (found.prefill_seconds.count, found.prefill_seconds.total) == (2, 0.0)
    assert (found.inter_token_seconds.count, found.inter_token_seconds.total) == (2, 2.0)
    assert (found.request_seconds.count, found.request_seconds.total) == (2, 3.0 + 4.0)
    assert (found.decode_seconds.count, found.decode_seconds.total) == (1, 2.0)
    assert (found.output_token_seconds.count, found.output_token_seconds.total) == (1, 1.0)
    assert (found.prompt_lengths.count, found.prompt_lengths.total) == (2, 2 + 3)
    assert (found.output_lengths.count, found.output_lengths.total) == (2, 3 + 1)
    assert (found.step_tokens.count, found.step_tokens.total) == (4, 2 + 1 + 1 + 3)


def test_prefix_queries_and_hits_count_tokens() -> None:
    engine, _ = an_engine(block_tokens=4)
    prompt = list(range(10))
    for name in ("a", "b"):
        engine.add(a_request(name, prompt, max_tokens=1))
        engine.step()
    assert (engine.scheduler.admission.num_queried_tokens, engine.scheduler.admission.num_hit_tokens) == (20, 8)


def test_an_aborted_request_leaves_no_times() -> None:
    engine, _ = an_engine()
    request = a_request("a", [1, 2], max_tokens=3)
    engine.add(request)
    engine.abort(request.request_id)
    assert engine.statistics.num_open == 0
    assert engine.statistics.request_seconds.count == 0


@given(st.lists(st.floats(-10, 1000), max_size=50))
def test_a_histogram_counts_each_value_once(values: list[float]) -> None:
    histogram = Histogram((0.0, 1.0, 10.0))
    for value in values:
        histogram.observe(value)
    below = [sum(value <= bound for value in values) for bound in histogram.bounds]
    assert [sum(histogram.counts[: number + 1]) for number in range(3)] == below
    assert histogram.count == len(values)
    assert histogram.total == pytest.approx(sum(values))
