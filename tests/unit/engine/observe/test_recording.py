"""Recordings of an engine: the log of its steps, the timeline, and runs that cannot be replayed."""

from dataclasses import replace

import pytest
from harness.fakes.recorded import a_request, an_engine, record, run_all

from kvferry.core.clock import ManualClock
from kvferry.core.errors import UsageError
from kvferry.core.ids import RequestId
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.loop.record_steps import RecordingSettings, begin_recording, end_recording
from kvferry.engine.observe.log_file import END_TOKEN, read_log, sampling_of, write_log
from kvferry.engine.observe.step_log import ABORT, ADD, RESET
from kvferry.engine.observe.timeline import (
    ENGINE,
    GAP,
    KERNELS,
    RUNNER,
    Timeline,
    TimelinePhase,
    chrome_trace,
    statistics,
    with_gaps,
)
from kvferry.engine.observe.watch import NO_WATCH


def test_a_log_has_events_plans_and_tokens() -> None:
    engine = an_engine()
    recording = begin_recording(engine, RecordingSettings(ManualClock(), 100, "m", has_tokens=True))
    engine.add(a_request("a", 40, 3))
    engine.step()
    engine.add(a_request("b", 5, 9))
    engine.step()
    engine.abort(RequestId("b"))
    run_all(engine)
    engine.reset_prefix_cache()
    engine.step()
    end_recording(engine, recording)
    first, second, third, *_, last = recording.log.steps
    assert first.events == [(ADD, 0)]
    assert first.plan == [(0, 0, 40, 1)]
    assert [len(ids) for _, ids in first.tokens] == [1]
    assert second.events == [(ADD, 1)]
    assert sorted(second.plan) == [(0, 40, 1, 1), (1, 0, 5, 1)]
    assert third.events == [(ABORT, 1)]
    assert (last.events, last.plan) == ([(RESET, 0)], [])
    assert recording.log.obstacle == ""
    request = recording.log.requests[0]
    assert (len(request.tokens), request.num_prompt, request.max_tokens_total) == (43, 40, 43)
    assert engine.watch is NO_WATCH


def test_a_recording_ends_itself() -> None:
    engine, ended = an_engine(), []
    recording = begin_recording(engine, RecordingSettings(ManualClock(), 3, "m", on_full=lambda: ended.append(1)))
    engine.add(a_request("a", 4, 9))
    run_all(engine)
    assert (len(recording.log.steps), recording.is_full, ended) == (3, True, [1])
    end_recording(engine, recording)
    assert ended == [1]
    idle = begin_recording(engine, RecordingSettings(ManualClock(), 1, "m"))
    for _ in range(10):
        engine.step()
    assert idle.is_full


@pytest.mark.parametrize("has_tokens", [False, True])
def test_a_log_survives_its_file(has_tokens: bool) -> None:
    log = record([(0, a_request("a", 40, 3)), (1, a_request("b", 40, 5))], has_tokens=has_tokens)
    lines = list(write_log(log))
    found = read_log(lines)
    assert [(s.events, s.plan, s.is_ahead, s.stopped) for s in found.steps] == [
        (s.events, s.plan, s.is_ahead, s.stopped) for s in log.steps
    ]
    assert found.engine == log.engine
    if has_tokens:
        assert {n: r.tokens for n, r in found.requests.items()} == {n: r.tokens for n, r in log.requests.items()}
        assert sampling_of(found.requests[0]) == a_request("a", 40, 3).sampling
    else:
        assert all(not request.sampling for request in found.requests.values())
        assert [len(r.tokens) for r in found.requests.values()] == [len(r.tokens) for r in log.requests.values()]
        shared = 40 // log.engine.block_tokens * log.engine.block_tokens
        a, b = (request.tokens for request in found.requests.values())
        assert a[:shared] == b[:shared]
        prompt = log.requests[0].tokens[:40]
        assert "".join(lines).count(str(prompt)[1:20]) == 0


def test_an_end_token_is_marked_in_a_log_without_tokens() -> None:
    log = record([(0, a_request("a", 8, 30))], eos=True)
    assert log.steps[-1].stopped == [0]
    found = read_log(write_log(log))
    assert found.steps[-1].tokens == [(0, [END_TOKEN])]


def test_runs_that_cannot_be_replayed_are_refused_with_the_reason() -> None:
    engine = an_engine()
    engine.add(a_request("a", 40, 3))
    engine.step()
    running = begin_recording(engine, RecordingSettings(ManualClock(), 5, "m"))
    assert "were running" in running.log.obstacle
    run_all(engine)
    assert "were running" in running.log.obstacle
    cached = begin_recording(engine, RecordingSettings(ManualClock(), 5, "m"))
    assert "not empty" in cached.log.obstacle
    emptied = begin_recording(engine, RecordingSettings(ManualClock(), 5, "m", resets_cache=True))
    assert emptied.log.obstacle == ""
    late = a_request("b", 5, 2)
    engine.add(replace(late, deadline=1e9))
    assert "deadline" in emptied.log.obstacle


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [], "line 1"),
        (lambda lines: ["{}"], "'kvferry_steps' is missing"),
        (lambda lines: [lines[0].replace('"kvferry_steps":1', '"kvferry_steps":2')], "the version must be 1, not 2"),
        (lambda lines: [lines[0].replace("fcfs", "later")], "srtf, two-level, weighted, not 'later'"),
        (lambda lines: [lines[0], '{"events":[["jump",0]],"plan":[],"tokens":[],"is_ahead":false,"begun":0,"ended":1}'],
         "line 2 of the step log is invalid: the event 'jump' is unknown"),
        (lambda lines: lines[:-1], "request 0 has an `add` event but no request line"),
        (lambda lines: [*lines[:-1], lines[-1].replace('"num_prompt":40', '"num_prompt":4000')], "blocks for"),
        (lambda lines: [*lines[:-1], lines[-1].replace('"num_prompt":40', '"num_prompt":-1')], "-1 is not a whole"),
        (lambda lines: ["[" * 100_000], "line 1"),
    ],
)  # fmt: skip
def test_an_invalid_log_is_refused_by_line(change, message) -> None:
    lines = list(write_log(record([(0, a_request("a", 40, 3))])))
    with pytest.raises(UsageError) as caught:
        read_log(change(lines))
    assert message in str(caught.value)


def test_phases_are_adjacent_and_gaps_are_between_steps() -> None:
    line = Timeline()
    for name, now in (("plan", 1.0), ("compute", 2.0)):
        line.begin(ENGINE, name, now)
    line.begin(RUNNER, "forward", 2.5)
    line.begin(RUNNER, "", 4.5)
    line.kernels({"qkv": 3.0, "attention": 1.0, "down": 0.0})
    line.end(ENGINE, 5.0)
    line.end(ENGINE, 6.0)
    line.begin(ENGINE, "plan", 7.0)
    line.end(ENGINE, 8.0)
    assert [(s.lane, s.name, s.begun, s.ended) for s in with_gaps(line.spans)] == [
        (ENGINE, "plan", 1.0, 2.0), (ENGINE, "compute", 2.0, 5.0), (RUNNER, "forward", 2.5, 4.5),
        (KERNELS, "qkv", 2.5, 4.0), (KERNELS, "attention", 4.0, 4.5), (ENGINE, GAP, 5.0, 7.0),
        (ENGINE, "plan", 7.0, 8.0),
    ]  # fmt: skip
    rows = {(row.lane, row.name): row for row in statistics(with_gaps(line.spans))}
    assert rows[ENGINE, "plan"].count == 2
    assert rows[ENGINE, "plan"].mean_ms == 1000.0
    assert rows[ENGINE, GAP].share == pytest.approx(2.0 / 7.0)


def test_a_chrome_trace_has_microseconds_and_named_lanes() -> None:
    log = record([(0, a_request("a", 40, 2))])
    trace = chrome_trace([TimelinePhase(ENGINE, "plan", 0.001, 0.0025)], log.steps)
    events = trace["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["steps", "engine", "runner", "kernels"]
    assert events[-1] == {"ph": "X", "pid": 1, "tid": 1, "name": "plan", "ts": 1000.0, "dur": 1500.0}
    first = next(event for event in events if event["name"] == "step 0")
    assert first["args"] == {"sequences": 1, "tokens": 40, "decoding": 0}


def test_the_limits_of_a_replay_are_those_of_the_engine() -> None:
    limits = SchedulerLimits(64, 32, 16, max_num_seqs=3, scheduling="srtf")
    assert record([(0, a_request("a", 4, 2))], limits=limits).engine.limits == limits
