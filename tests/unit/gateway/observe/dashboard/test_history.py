"""The history of a gateway's latency and rates: windows, bounds, pauses."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.causes import ComputeCause
from kvferry.core.inference.chunks import KvReport, Timing, Usage
from kvferry.gateway.observe.dashboard.history import INTERVAL_SECONDS, MAX_POINTS, WINDOW_SECONDS, History, Totals
from kvferry.gateway.observe.dashboard.quantiles import Buckets
from kvferry.gateway.observe.instruments import GatewayInstruments


def totals(fast: int = 0, slow: int = 0, tokens: int = 0, requests: int = 0, errors: int = 0) -> Totals:
    """Return a reading with `fast` observations below 1 s and `slow` ones below 2 s in both histograms, and a failed
    stream for each two errors."""
    buckets = Buckets((1.0, 2.0, math.inf), (fast, fast + slow, fast + slow))
    sources = {"computed": 1, "cached": 0, "peer": 0, "tier": 0}
    return Totals(buckets, buckets, tokens, requests, errors, {"done": fast, "failed": errors // 2}, sources, 0)


def test_the_first_reading_makes_no_point() -> None:
    history = History()
    history.add(10.0, totals(fast=100, tokens=1000))
    assert history.overview(10.0, totals())["series"]["seconds_ago"] == []


def test_a_point_covers_the_window_before_it() -> None:
    history = History()
    for number in range(40):  # fast requests up to reading 20, slow ones later; 5 tokens per second
        history.add(number * INTERVAL_SECONDS, totals(min(number, 20) * 4, max(0, number - 20) * 4, number * 10))
    series = history.overview(80.0, totals())["series"]
    assert series["output_tokens_per_second"] == [pytest.approx(5.0)] * 39
    assert series["first_token_p50"][10] == pytest.approx(0.5)
    assert series["first_token_p50"][-1] == pytest.approx(1.5), "the window contains no fast request"
    assert series["first_token_p95"][-1] == pytest.approx(1.95)
    assert series["token_gap_p50"] == series["first_token_p50"]
    assert series["seconds_ago"][-1] == pytest.approx(2.0)


def test_requests_and_errors_are_rates_of_the_window() -> None:
    history = History()
    for number in range(30):  # 4 requests per second, of which one fails
        history.add(number * INTERVAL_SECONDS, totals(requests=number * 8, errors=number * 2))
    overview = history.overview(60.0, totals(requests=300, errors=60))
    assert overview["series"]["requests_per_second"] == [pytest.approx(4.0)] * 29
    assert overview["series"]["errors_per_second"] == [pytest.approx(1.0)] * 29
    assert overview["series"]["failed_streams_per_second"] == [pytest.approx(0.5)] * 29
    assert (overview["totals"]["requests"], overview["totals"]["errors"]) == (300, 60)


def test_answers_of_probes_are_no_requests_and_only_servers_faults_are_errors() -> None:
    instruments = GatewayInstruments()
    for path, status in (
        ("/v1/completions", "200"),
        ("/v1/completions", "429"),
        ("/v1/messages", "503"),
        ("/health", "200"),
        ("/ready", "503"),
        ("/ping", "200"),
        ("other", "0"),
    ):
        instruments.requests.labels(path, status).inc()
    found = instruments.totals()
    assert (found.requests, found.errors) == (4, 1)


def test_observations_before_a_pause_are_not_counted_after_it() -> None:
    history = History()
    for number in range(5):
        history.add(number * 2.0, totals(fast=number))
    history.add(1000.0, totals(fast=4, slow=6))
    history.add(1002.0, totals(fast=4, slow=8))
    series = history.overview(1002.0, totals())["series"]
    assert series["first_token_p50"][-1] == pytest.approx(1.5)
    assert series["seconds_ago"] == sorted(series["seconds_ago"], reverse=True)


def test_a_reading_just_after_the_last_one_is_left_out() -> None:
    history = History()
    history.add(1.0, totals())
    for now in (1.0, 0.5, 1.0 + 1e-300, 1.9):
        history.add(now, totals(fast=5, tokens=5))
    assert history.overview(2.0, totals())["series"]["seconds_ago"] == []


@given(steps=st.lists(st.floats(0, 100), max_size=400))
def test_memory_is_bounded_and_the_overview_is_json(steps: list[float]) -> None:
    history, now = History(), 0.0
    for number, step in enumerate(steps):
        now += step
        history.add(now, totals(fast=number, tokens=number))
    overview = history.overview(now, totals())
    lengths = {len(values) for values in overview["series"].values()}
    assert len(lengths) == 1
    assert lengths.pop() <= MAX_POINTS
    assert len(history._readings) <= WINDOW_SECONDS / INTERVAL_SECONDS + 1
    json.dumps(overview, allow_nan=False)


def test_many_readings_keep_the_newest_points() -> None:
    history = History()
    for number in range(MAX_POINTS + 50):
        history.add(number * 2.0, totals())
    ages = history.overview((MAX_POINTS + 49) * 2.0, totals())["series"]["seconds_ago"]
    assert (len(ages), ages[0], ages[-1]) == (MAX_POINTS, (MAX_POINTS - 1) * 2.0, 0.0)


def test_the_instruments_of_a_gateway_are_read() -> None:
    instruments = GatewayInstruments()
    empty = instruments.totals()
    assert (empty.output_tokens, empty.streams) == (0, {})
    assert empty.sources == {"computed": 0, "cached": 0, "peer": 0, "tier": 0}
    report = KvReport("d", "peer", num_tokens=90, num_chosen=90, blocks_loaded=6)
    timing = Timing(prefill_worker="p", decode_worker="d", first_token_seconds=0.03, total_seconds=1.0, kv=(report,))
    instruments.tokens_arrived(3, timing.first_token_seconds)
    instruments.tokens_arrived(4, None)
    instruments.stream_ended("done", Usage(100, 7, 40), timing)
    instruments.stream_ended("failed", Usage(100, 0, 0), Timing())
    instruments.token_gap_seconds.observe(0.004)
    found = instruments.totals()
    assert (found.output_tokens, found.handoff_tokens) == (7, 90)
    assert found.streams == {"done": 1, "failed": 1}
    assert found.sources == {"computed": 60, "cached": 40, "peer": 0, "tier": 0}
    assert found.first_token.bounds[-1] == math.inf
    assert found.first_token.counts[-1] == found.token_gap.counts[-1] == 1
    history = History()
    history.add(0.0, empty)
    history.add(2.0, found)
    series = history.overview(2.0, found)["series"]
    assert 0.02 < series["first_token_p50"][0] <= 0.05
    assert 0.002 < series["token_gap_p95"][0] <= 0.005


def test_causes_and_seen_tokens_are_shown_since_the_start() -> None:
    instruments = GatewayInstruments()
    instruments.computed_tokens.labels(ComputeCause.EVICTED).inc(64)
    instruments.prompt_routed(100, num_named=96, num_seen=80, is_exact=False)
    found = History().overview(0.0, instruments.totals())["totals"]
    assert found["computed_tokens_by_cause"] == [
        {"cause": "evicted", "help": "blocks whose pages were reused", "num_tokens": 64}
    ]
    assert found["prompt_tokens_seen"] == {"seen": 80, "new": 16, "unnamed": 4}
    assert instruments.registry.get_sample_value("kvferry_gateway_seen_prompt_tokens_exact") == 0
    json.dumps(found, allow_nan=False)
