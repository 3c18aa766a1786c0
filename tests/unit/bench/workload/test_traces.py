"""Traces in Mooncake's and Azure's formats; errors in a trace name the line."""

import json
import time

import pytest

from kvferry.bench.workload.requests import token_block
from kvferry.bench.workload.traces import HASH_TOKENS, read_trace
from kvferry.core.errors import UsageError

MOONCAKE = [
    {"timestamp": 27000, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]},
    {"timestamp": 28500, "input_length": 600, "output_length": 26, "hash_ids": [46, 99]},
    {"timestamp": 27500, "input_length": 40, "output_length": 0},
]
AZURE = [
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:15:46.6805900,374,44",
    "2023-11-16 18:15:50.9951690,396,109",
    "",
]


def lines(entries: list[dict[str, object]]) -> list[str]:
    return [json.dumps(entry) + "\n" for entry in entries]


def test_equal_block_ids_are_equal_tokens() -> None:
    first, short, second = read_trace(lines(MOONCAKE))
    assert [r.at for r in (first, short, second)] == [0.0, 0.5, 1.5]
    assert [len(r.prompt) for r in (first, short, second)] == [1100, 40, 600]
    assert [r.num_output for r in (first, short, second)] == [52, 1, 26]
    assert first.prompt[:HASH_TOKENS] == second.prompt[:HASH_TOKENS]
    assert first.prompt[HASH_TOKENS : HASH_TOKENS + 80] != second.prompt[HASH_TOKENS : HASH_TOKENS + 80]


def test_tokens_beyond_the_block_ids_belong_to_the_line() -> None:
    entries = [{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}] * 2
    first, second = read_trace(lines(entries))
    assert first.prompt[:512] == second.prompt[:512]
    assert first.prompt[512:] != second.prompt[512:]


def test_own_traces_name_the_blocks_of_prompt_and_output() -> None:
    entry = {"timestamp": 5, "input_length": 20, "output_length": 15, "block_tokens": 16, "hash_ids": [8, 9]}
    (first,) = read_trace(lines([entry]))
    (longer,) = read_trace(lines([{**entry, "input_length": 40, "output_length": 2}]))
    assert (len(first.prompt), first.num_output, len(first.output or ())) == (20, 15, 15)
    assert (*first.prompt, *(first.output or ()))[:32] == longer.prompt[:32]
    (without,) = read_trace(lines(MOONCAKE[:1]))
    assert without.output is None


def test_azures_csv_has_lengths_only() -> None:
    first, second = read_trace(AZURE)
    assert (first.at, len(first.prompt), first.num_output) == (0.0, 374, 44)
    assert (second.at, len(second.prompt), second.num_output) == (pytest.approx(4.314579), 396, 109)


def test_a_trace_can_be_replayed_faster_and_in_part() -> None:
    assert [r.at for r in read_trace(lines(MOONCAKE), limit=2, speed=3.0)] == [0.0, 0.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ([], "the trace begins with ''"),
        (["a,b,c\n"], "the trace begins with 'a,b,c'"),
        ([AZURE[0]], "the trace contains no requests"),
        ([*AZURE[:2], "yesterday,1,2"], "line 3 of the trace is invalid"),
        ([AZURE[0], "2023-11-16 18:15:46,1"], "line 2 of the trace is invalid"),
        ([AZURE[0], "2023-11-16 18:15:46,-1,4"], "a length must be an integer between 1 and 1048576, not -1"),
        (['{"timestamp": 1}'], "line 1 of the trace is invalid: 'input_length' is missing"),
        (
            ['{"timestamp": 1, "input_length": 1e3, "output_length": 1}'],
            "a length must be an integer between 1 and 1048576, not 1000.0",
        ),
        (
            ['{"timestamp": 1, "input_length": true, "output_length": 1}'],
            "a length must be an integer between 1 and 1048576, not True",
        ),
        (
            ['{"timestamp": 1, "input_length": 9999999999, "output_length": 1}'],
            "a length must be an integer between 1 and 1048576, not 9999999999",
        ),
        (['{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": 3}'], "hash_ids is not a list"),
        (['{"timestamp": null, "input_length": 1, "output_length": 1}'], "line 1 of the trace is invalid"),
        (['{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1, 2]}'], "one for each block"),
        (
            ['{"timestamp": 1, "input_length": 1, "output_length": 1, "block_tokens": 0}'],
            "a length must be an integer between 1 and 1048576, not 0",
        ),
        ([*lines(MOONCAKE), "{"], "line 4 of the trace is invalid"),
        (["{" * 100_000], "line 1 of the trace is invalid"),
        ([*lines(MOONCAKE), "[1]"], "line 4 of the trace is invalid: it is not a JSON object"),
        ([AZURE[0], "2023-11-16 18:15:46,1"], "2 cells instead of 3"),
        ([AZURE[0], "2023-11-16 18:15:46,1e3,4"], "not 1e3"),
        ([AZURE[0], f"2023-11-16 18:15:46,{'9' * 5000},4"], "not 9999"),
        ([AZURE[0], "x" * 200_000], "line 2 of the trace is invalid: field larger"),
        ([f'{{"timestamp": {"9" * 5000}}}'], "a number has too many digits"),
        (
            ['{"timestamp": 0, "input_length": 1048576, "output_length": 1}'] * 2,
            "the trace has 2097152 tokens up to line 2; at most 2000000 are read: shorten it",
        ),
    ],
)
def test_errors_in_a_trace_name_the_line(text: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.bench.workload.traces._MAX_TRACE_TOKENS", 2_000_000, raising=False)
    with pytest.raises(UsageError) as caught:
        read_trace(text)
    assert message in str(caught.value)
    assert caught.value.field == "arrivals"


def test_the_speed_must_be_positive() -> None:
    with pytest.raises(UsageError, match="trace_speed must be above 0, not 0"):
        read_trace(lines(MOONCAKE), speed=0)


@pytest.mark.parametrize("when", [-1, -1e300, 1e300, float("nan"), float("inf"), True, "1", None], ids=repr)
def test_a_timestamp_is_a_time(when: object) -> None:
    with pytest.raises(
        UsageError, match=r"line 1 of the trace is invalid: the timestamp must be in milliseconds, .*, not"
    ):
        read_trace(lines([{"timestamp": when, "input_length": 1, "output_length": 1}]))


def test_the_times_of_azures_csv_do_not_depend_on_the_time_zone_of_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        night = read_trace([AZURE[0], "2023-10-29 00:30:00,1,1", "2023-10-29 03:30:00,1,1"])
    finally:
        monkeypatch.undo()
        time.tzset()
    assert night[1].at == 3 * 3600


def test_tokens_of_prompts_share_their_objects() -> None:
    tokens = token_block("x", 50_000)
    assert len(set(map(id, tokens))) <= 4000
