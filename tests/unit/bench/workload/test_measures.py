"""Statistics of responses, checked against values computed by hand."""

import pytest

from kvferry.bench.serving.picture import picture
from kvferry.bench.workload.measures import MeasuredAnswer, meets, parse_slo, summary
from kvferry.core.errors import UsageError

FAST = MeasuredAnswer(1.0, 1.0, (1.1, 1.2, 1.3), 10, 3)
SLOW = MeasuredAnswer(2.0, 2.5, (4.0, 4.0, 6.0), 20, 5)
SINGLE = MeasuredAnswer(0.0, 0.0, (0.5,), 5, 1)
FAILED = MeasuredAnswer(3.0, 3.0, (), 7, 0, "HTTP 500")


def test_times_count_from_the_arrival_and_not_from_the_sending() -> None:
    assert SLOW.ttft == 2.0
    assert SLOW.e2el == 4.0
    assert SLOW.tpot == 0.5
    assert SLOW.gaps == [0.0, 2.0]
    assert SINGLE.tpot is None


def test_the_summary_has_the_names_of_vllm() -> None:
    found = summary([FAST, SLOW, SINGLE, FAILED], {"ttft": 0.6})
    assert (found["completed"], found["failed"], found["duration"]) == (3, 1, 6.0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (35, 9)
    assert found["request_throughput"] == pytest.approx(0.5)
    assert found["output_throughput"] == pytest.approx(1.5)
    assert found["total_token_throughput"] == pytest.approx(44 / 6)
    assert found["request_goodput"] == pytest.approx(2 / 6)
    assert found["max_send_delay_ms"] == pytest.approx(500.0)
    assert found["median_ttft_ms"] == pytest.approx(500.0)
    assert found["mean_ttft_ms"] == pytest.approx(1e3 * (0.1 + 2.0 + 0.5) / 3)
    assert found["p90_ttft_ms"] == pytest.approx(1e3 * (0.5 + 0.8 * 1.5))
    assert found["median_tpot_ms"] == pytest.approx(300.0)
    assert found["p99_itl_ms"] == pytest.approx(1e3 * (0.1 + 0.97 * 1.9))
    assert found["median_e2el_ms"] == pytest.approx(500.0)


def test_a_run_without_answers_has_zeros() -> None:
    found = summary([FAILED], {})
    assert (found["completed"], found["p99_ttft_ms"], found["request_throughput"]) == (0, 0.0, 0.0)
    assert found["request_goodput"] is None


def test_targets_count_for_each_request() -> None:
    slo = parse_slo("ttft=600ms, itl=0.15s,e2el=1s")
    assert slo == {"ttft": 0.6, "itl": 0.15, "e2el": 1.0}
    assert [meets(answer, slo) for answer in (FAST, SLOW, SINGLE, FAILED)] == [True, False, True, False]
    assert not meets(FAST, parse_slo("tpot=50ms"))
    assert parse_slo("") == {}


@pytest.mark.parametrize(
    "text", ["ttft", "ttft=5", "ttft=ms", "ttft=-1s", "ttft=nans", "ttft=infs", "speed=1s", "ttft=1s,ttft=2s", "=1s"]
)
def test_a_wrong_target_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a target; use one of ttft, tpot, itl, e2el|is set twice"):
        parse_slo(text)


def test_the_picture_has_a_line_for_each_measure_and_escapes_names() -> None:
    drawn = picture([FAST, SLOW, SINGLE, FAILED], "a <model> & more")
    assert drawn.startswith("<svg ")
    assert "a &lt;model&gt; &amp; more" in drawn
    assert drawn.count("<polyline") == 4
    assert picture([FAILED], "none").count("<polyline") == 0
    assert picture([FAILED], "none").count("no values") == 4


def test_the_picture_marks_percentiles_and_targets_and_has_a_dark_form() -> None:
    answers = [MeasuredAnswer(0.0, 0.0, (0.01 * n, 0.02 * n), 10, 2) for n in range(1, 101)]
    drawn = picture(answers, "load", "machine <1>", {"ttft": 0.5})
    assert "machine &lt;1&gt;" in drawn
    ttft = drawn[: drawn.index("time per output token")]
    assert "p50 505, p90 901, p99 990" in ttft
    assert ttft.count("<circle") == 3
    assert "target 500" in ttft
    assert drawn.count("target") == 1
    assert "@media(prefers-color-scheme:dark)" in drawn
    assert "logarithmic" not in drawn


def test_outliers_make_an_axis_logarithmic() -> None:
    answers = [MeasuredAnswer(0.0, 0.0, (0.001 * n,), 10, 1) for n in (*range(1, 100), 60_000)]
    drawn = picture(answers, "load")
    ttft = drawn[: drawn.index("time per output token")]
    assert "time to first token, ms, logarithmic" in ttft
    assert ">100,000<" in ttft
    assert "e+0" not in drawn
