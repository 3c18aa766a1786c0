"""The list of what runs and waits: oldest first, bounded, states in the words of operators, nothing of prompts."""

import json
from dataclasses import asdict, replace

import pytest

from kvferry.core.ids import RequestId
from kvferry.core.sampling import SampledToken, SamplingParams
from kvferry.gateway.decide.lifecycle.sample_run import SampleRun
from kvferry.gateway.decide.lifecycle.sample_states import SampleEvent
from kvferry.gateway.observe.dashboard.running import MAX_RUNNING, oldest, state_of
from kvferry.serving.admission import RequestSize
from kvferry.serving.request import Caller, Request

CALLER = Caller(RequestId("r"), "alice", cache_salt="a-secret-salt")
SECRETS = [4711, 4712, 4713]


def a_run(name: str = "r", arrived: float = 0.0, *, num_beams: int = 0) -> SampleRun:
    caller = replace(CALLER, request_id=RequestId(name), arrived=arrived)
    return SampleRun(Request(caller, SECRETS, SamplingParams(max_tokens=4), 1), num_beams=num_beams)


def a_size(name: str, arrived: float) -> RequestSize:
    caller = replace(CALLER, request_id=RequestId(name), arrived=arrived)
    return RequestSize(caller, [SECRETS, SECRETS], num_samples=2, num_running=4, max_tokens=4)


def test_samples_and_waiting_requests_are_listed_oldest_first() -> None:
    listed, num_further = oldest([a_run("b", 5.0), a_run("d", 9.0)], [a_size("c", 7.0), a_size("a", 2.0)], 10.0)
    assert [(one.request_id, one.age_seconds) for one in listed] == [("a", 8.0), ("b", 5.0), ("c", 3.0), ("d", 1.0)]
    assert [one.prompt_tokens for one in listed] == [6, 3, 6, 3]
    assert [one.sample_index for one in listed] == [0, 1, 0, 1]
    assert {one.state for one in listed} == {"queued"}
    assert num_further == 0
    assert oldest([], [], 10.0) == ([], 0)


def test_the_list_is_bounded_and_counts_the_rest() -> None:
    listed, num_further = oldest([a_run(f"r{number}", 1000.0 - number) for number in range(200)], [], 2000.0)
    assert (len(listed), num_further) == (MAX_RUNNING, 150)
    assert listed[0].request_id == "r199"


@pytest.mark.parametrize(
    ("events", "num_tokens", "state"),
    [
        ([], 0, "queued"),
        ([SampleEvent.CALL_PREFILL], 0, "prefill"),
        ([SampleEvent.CALL_PREFILL, SampleEvent.OFFER], 1, "handoff"),
        ([SampleEvent.CALL_PREFILL, SampleEvent.OFFER, SampleEvent.CALL_DECODE], 1, "handoff"),
        ([SampleEvent.CALL_PREFILL, SampleEvent.OFFER, SampleEvent.CALL_DECODE, SampleEvent.FETCH], 1, "decode"),
        ([SampleEvent.CALL_DECODE], 0, "prefill"),
        ([SampleEvent.CALL_DECODE], 2, "decode"),
        ([SampleEvent.CALL_DECODE, SampleEvent.LOSE], 2, "queued"),
        ([SampleEvent.CALL_DECODE, SampleEvent.FINISH], 2, "done"),
    ],
)
def test_each_state_has_a_word(events: list[SampleEvent], num_tokens: int, state: str) -> None:
    run = a_run()
    for event in events:
        run.on(event)
    if num_tokens:
        run.emit(tuple(SampledToken(number) for number in range(num_tokens)), None, 1.0)
    assert state_of(run) == state


def test_a_search_is_one_entry_with_the_tokens_of_all_beams() -> None:
    run = a_run(num_beams=4)
    run.emitted = [1, 2, 3]
    (listed,), _ = oldest([run], [], 1.0)
    assert (listed.state, listed.beam_width, listed.output_tokens) == ("search", 4, 12)


def test_an_entry_names_workers_and_has_nothing_of_the_prompt() -> None:
    run = a_run()
    run.time(prefill_worker="p0", decode_worker="d1")
    run.emitted = [815]
    listed, _ = oldest([run], [a_size("w", 0.0)], -1.0)
    assert (listed[0].prefill_worker, listed[0].decode_worker, listed[0].age_seconds) == ("p0", "d1", 0.0)
    shown = json.dumps([asdict(one) for one in listed])
    assert not [word for word in ("471", "815", "secret", "token_ids", "scope") if word in shown]
