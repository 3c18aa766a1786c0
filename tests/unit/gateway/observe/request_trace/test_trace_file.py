"""The request trace: fields of its lines, hidden data, shared prefixes of a replay, and the size limit of its files."""

import json
import stat
from pathlib import Path

import pytest

from kvferry.bench.workload.traces import read_trace
from kvferry.core.errors import UsageError
from kvferry.core.hashing import BlockNamers
from kvferry.gateway.observe.request_trace.trace_file import MIN_BYTES, TraceFile
from kvferry.gateway.observe.request_trace.trace_line import BLOCK_TOKENS, TracedSample, trace_line

PROMPT = tuple(range(100, 140))
OUTPUT = tuple(range(500, 520))


def sample(prompt: tuple[int, ...] = PROMPT, output: tuple[int, ...] = OUTPUT, scope: str = "acme") -> TracedSample:
    return TracedSample(1_700_000_000.25, prompt, output, scope)


def test_a_line_has_times_lengths_and_ids_only() -> None:
    entry = json.loads(trace_line(sample(), BlockNamers(b"key")))
    assert set(entry) == {"timestamp", "input_length", "output_length", "block_tokens", "hash_ids"}
    assert (entry["timestamp"], entry["input_length"], entry["output_length"]) == (1_700_000_000_250, 40, 20)
    assert len(entry["hash_ids"]) == 60 // BLOCK_TOKENS


def test_ids_depend_on_the_key_and_on_the_scope() -> None:
    def ids(key: bytes, scope: str) -> list[int]:
        return list(json.loads(trace_line(sample(scope=scope), BlockNamers(key)))["hash_ids"])

    assert ids(b"key", "acme") == ids(b"key", "acme")
    assert not set(ids(b"key", "acme")) & set(ids(b"other", "acme"))
    assert not set(ids(b"key", "acme")) & set(ids(b"key", "globex"))


def test_the_next_turn_of_a_replay_begins_with_prompt_and_answer() -> None:
    namers = BlockNamers(b"key")
    turn = (*PROMPT, *OUTPUT, *range(700, 730))
    first, second = read_trace([trace_line(sample(), namers), trace_line(sample(turn), namers)])
    assert (len(first.prompt), first.num_output, len(first.output or ())) == (40, 20, 20)
    shared = 60 // BLOCK_TOKENS * BLOCK_TOKENS
    assert (*first.prompt, *(first.output or ()))[:shared] == second.prompt[:shared]
    assert len(second.prompt) == len(turn)


def test_the_files_are_private_and_keep_within_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    trace = TraceFile(path, MIN_BYTES, b"")
    for number in range(1500):
        trace.add(sample((number, *PROMPT)))
    trace.close()
    trace.close()
    old = tmp_path / "requests.jsonl.old"
    assert sorted(tmp_path.iterdir()) == [path, old]
    assert MIN_BYTES // 2 < path.stat().st_size + old.stat().st_size <= MIN_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    kept = [*read_trace(old.read_text().splitlines()), *read_trace(path.read_text().splitlines())]
    assert trace.num_dropped == 0
    assert len(kept) > 100
    assert {len(request.prompt) for request in kept} == {41}


def test_an_existing_file_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    for _ in range(2):
        trace = TraceFile(path, MIN_BYTES, b"secret of the pool")
        trace.add(sample())
        trace.close()
    first, second = read_trace(path.read_text().splitlines())
    assert first.prompt[:32] == second.prompt[:32]


def test_lines_that_do_not_fit_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = TraceFile(tmp_path / "trace", MIN_BYTES, b"")
    trace.add(sample(tuple(range(100_000))))
    trace.close()
    assert trace.num_dropped == 1
    trace.add(sample())
    assert trace.num_dropped == 2
    monkeypatch.setattr("kvferry.gateway.observe.request_trace.trace_file._MAX_QUEUED", 0)
    full = TraceFile(tmp_path / "trace", MIN_BYTES, b"")
    full.add(sample())
    full.close()
    assert full.num_dropped == 1
    assert (tmp_path / "trace").read_bytes() == b""


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="use a file in a folder that exists") as caught:
        TraceFile(tmp_path / "none" / "trace", MIN_BYTES, b"")
    assert caught.value.field == "trace_file"
    with pytest.raises(UsageError, match=f"trace_file_bytes must be at least {MIN_BYTES}"):
        TraceFile(tmp_path / "trace", 1, b"")


def test_an_existing_file_becomes_private_and_a_device_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("")
    path.chmod(0o644)
    TraceFile(path, MIN_BYTES, b"key").close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(UsageError, match="regular file"):
        TraceFile(Path("/dev/null"), MIN_BYTES, b"key")


def test_a_file_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    first = TraceFile(path, MIN_BYTES, b"")
    with pytest.raises(UsageError, match="is being written by another process; use another file"):
        TraceFile(path, MIN_BYTES, b"")
    first.close()
    TraceFile(path, MIN_BYTES, b"").close()
