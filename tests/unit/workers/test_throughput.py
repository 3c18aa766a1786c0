"""The line about an engine's throughput between two moments."""

from dataclasses import replace

from kvferry.workers.throughput import WorkDone, throughput_text

IDLE = WorkDone(100.0, 1000, 5000, 800, 400, 0, 0, 0.0)


def test_rates_are_of_the_time_between_two_moments() -> None:
    now = WorkDone(110.0, 1200, 5500, 1000, 550, 3, 2, 0.125)
    assert throughput_text(IDLE, now) == (
        "running 3, waiting 2; prompt 20.0 tokens/s, output 50.0 tokens/s; KV 12.5 % used, prefix cache hits 75.0 %"
    )


def test_an_idle_engine_has_no_line() -> None:
    assert throughput_text(IDLE, replace(IDLE, at=110.0, kv_usage=0.5)) is None
    assert throughput_text(IDLE, replace(IDLE, output_tokens=5001)) is None  # no time has passed


def test_an_engine_that_waits_has_a_line() -> None:
    text = throughput_text(IDLE, replace(IDLE, at=120.0, waiting=1))
    assert text is not None
    assert text.startswith("running 0, waiting 1; prompt 0.0 tokens/s")
    assert text.endswith("prefix cache hits none queried")
