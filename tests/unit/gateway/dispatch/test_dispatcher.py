import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from harness.fakes.scripted_fleet import ScriptedFleet, scripted_fleet
from harness.fakes.scripted_tokens import expected_tokens, scores_of
from harness.fakes.scripted_worker import Act, Fault, ScriptedWorker

from kvferry.core.clock import SystemClock
from kvferry.core.errors import (
    ENDS_OUTPUT,
    STEP_FAILED,
    DeadlinePassed,
    GenerationFailed,
    InvalidRequest,
    InvariantBroken,
    Overloaded,
    RequestRefused,
    Unavailable,
)
from kvferry.core.ids import RequestId
from kvferry.core.sampling import FinishReason, SamplingParams
from kvferry.gateway.decide.config import POLICIES, DispatchConfig, RetryConfig, RoutingConfig
from kvferry.serving.request import Caller, Request
from kvferry.serving.token_source import TokenEvent

_PROMPT = list(b"tell me a story of a ferry")
_NUM_TOKENS = 12


def ask(num_tokens: int = _NUM_TOKENS, *, seconds: float | None = None, **fields: Any) -> Request:
    now = SystemClock().monotonic()
    deadline = None if seconds is None else now + seconds
    params = SamplingParams(max_tokens=num_tokens, seed=7)
    of_caller = {key: fields.pop(key) for key in Caller.__dataclass_fields__ if key in fields}
    caller = Caller(**{"request_id": RequestId("r"), "arrived": now, "deadline": deadline, **of_caller})
    return Request(caller, **{"token_ids": _PROMPT, "sampling": params, **fields})


async def collect(fleet: ScriptedFleet, request: Request) -> list[TokenEvent]:
    async with asyncio.timeout(20), aclosing(fleet.dispatcher.stream(request)) as events:
        return [event async for event in events]


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token.token_id for event in events for token in event.tokens]


def check(events: list[TokenEvent], request: Request) -> None:
    limit = request.sampling.max_tokens
    assert limit is not None
    assert tokens_of(events) == expected_tokens(request.token_ids, request.sampling, limit, request.sample_index)
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason is FinishReason.LENGTH


def whoever_is_first(workers: list[ScriptedWorker], method: str, fault: Fault) -> None:
    """Give a group of workers one fault, which affects the first of them that is called."""
    shared: deque[Fault | None] = deque([fault])
    for worker in workers:
        worker.faults[method] = shared


@pytest.fixture
async def pair() -> AsyncGenerator[ScriptedFleet, None]:
    async with scripted_fleet(prefill=1, decode=1) as fleet:
        yield fleet


@pytest.fixture
async def two_pairs() -> AsyncGenerator[ScriptedFleet, None]:
    async with scripted_fleet(prefill=2, decode=2) as fleet:
        yield fleet


async def test_prefill_gives_the_first_token_and_decode_the_rest(pair):
    events = await collect(pair, ask())
    check(events, ask())
    (p,), (d,) = pair.workers.prefill[0].prefills, pair.workers.decode[0].decodes
    assert p.offer
    assert list(d.token_ids) == [*_PROMPT, tokens_of(events)[0]]
    assert (d.num_generated, d.sampling.seed, d.attempt) == (1, 7, 0)
    assert pair.workers.offers.released == []


async def test_the_first_token_does_not_wait_for_decode(pair):
    held = asyncio.Event()
    pair.workers.decode[0].step = held.wait
    async with aclosing(pair.dispatcher.stream(ask())) as events:
        first = await asyncio.wait_for(anext(events), 10)
        assert len(first.tokens) == 1
        held.set()
        assert len([event async for event in events]) == _NUM_TOKENS - 1


async def test_timing_has_the_duration_of_each_phase(pair):
    events = await collect(pair, ask())
    timing = events[-1].timing
    assert (timing.prefill_worker, timing.decode_worker) == ("p0", "d0")
    assert (timing.queue_seconds, timing.prefill_seconds, timing.handoff_seconds) == (0.25, 0.5, 0.125)
    assert (timing.handoff_outcome, timing.connector) == ("fetched", "scripted")
    assert (timing.handoff_blocks, timing.handoff_bytes, timing.resumed) == (2, 1024, 0)
    assert timing.first_token_seconds > 0
    assert (events[-1].num_cached_tokens, events[-1].num_written_tokens) == (1, 2), "a hand-off is no cached token"


async def test_other_policies_route_only_requests_that_ask_for_an_explanation(two_pairs):
    for name, is_explained in (("plain", False), ("explained", True)):
        await collect(two_pairs, ask(request_id=RequestId(name), is_explained=is_explained))
        (sample,) = two_pairs.dispatcher.journal.find("", RequestId(name))
        compared = {other["policy"] for note in sample["routes"] for other in note["others"]}
        assert compared == ({*POLICIES} - {sample["routes"][0]["policy"]} if is_explained else set())


async def test_one_token_needs_no_decode_worker(pair):
    check(await collect(pair, ask(1)), ask(1))
    assert pair.workers.decode[0].decodes == []


async def test_several_tokens_may_come_in_one_message(pair):
    pair.workers.decode[0].step_tokens = 5
    events = await collect(pair, ask())
    check(events, ask())
    assert [len(event.tokens) for event in events] == [1, 5, 5, 1]


async def test_samples_run_side_by_side(pair):
    samples = [ask(sample_index=index) for index in range(4)]
    for request, events in zip(samples, await asyncio.gather(*(collect(pair, r) for r in samples)), strict=True):
        check(events, request)


async def test_without_an_offer_of_prefill_decode_computes_the_prompt(pair):
    pair.workers.prefill[0].keeps_offers = False
    check(await collect(pair, ask()), ask())
    assert pair.workers.decode[0].decodes[0].ticket == b""


async def test_short_prompts_skip_prefill():
    async with scripted_fleet(
        prefill=1, decode=1, config=DispatchConfig(RoutingConfig(skip_prefill_below_tokens=100))
    ) as fleet:
        fleet.workers.decode[0].num_loaded = 3
        events = await collect(fleet, ask())
        check(events, ask())
        assert fleet.workers.prefill[0].prefills == []
        assert events[-1].num_cached_tokens == 2 + 3, "cached and loaded tokens"
        assert events[-1].timing.first_token_seconds > 0


async def test_one_worker_of_role_both_serves_everything():
    async with scripted_fleet(both=1) as fleet:
        check(await collect(fleet, ask()), ask())


async def test_incompatible_layouts_are_never_paired():
    async with scripted_fleet(prefill=1, decode=1) as fleet:
        fleet.workers.prefill[0].fingerprint = b"other"
        await fleet.fleet.wait_until(lambda f: f.views()[0].fingerprint == b"other")
        check(await collect(fleet, ask()), ask())
        assert fleet.workers.prefill[0].prefills == []


async def test_convertible_layouts_are_paired_when_there_are_no_equal_ones():
    async with scripted_fleet(prefill=1, decode=2) as fleet:
        prefill, (like, unlike) = fleet.workers.prefill[0], fleet.workers.decode
        for worker in (prefill, like, unlike):
            worker.family = b"model"
        unlike.fingerprint = b"other"
        await fleet.fleet.wait_until(lambda f: [v.family for v in f.views()] == [b"model"] * 3)
        await fleet.fleet.wait_until(lambda f: f.views()[2].fingerprint == b"other")
        for _ in range(3):
            check(await collect(fleet, ask()), ask())
        assert (len(like.decodes), len(unlike.decodes)) == (3, 0)
        like.draining = True
        await fleet.fleet.wait_until(lambda f: not f.views()[1].takes_work)
        check(await collect(fleet, ask()), ask())
        assert (len(prefill.prefills), len(unlike.decodes)) == (4, 1)
        assert unlike.decodes[0].ticket
        assert unlike.prepared == [], "KV prefetches need equal layouts"


async def test_a_ticket_whose_reader_is_lost_is_converted_by_another():
    async with scripted_fleet(prefill=1, decode=2) as fleet:
        prefill, (like, unlike) = fleet.workers.prefill[0], fleet.workers.decode
        for worker in (prefill, like, unlike):
            worker.family = b"model"
        unlike.fingerprint = b"other"
        await fleet.fleet.wait_until(lambda f: [v.family for v in f.views()] == [b"model"] * 3)
        await fleet.fleet.wait_until(lambda f: f.views()[2].fingerprint == b"other")
        like.faults["decode"].append(Fault(Act.FAIL))
        check(await collect(fleet, ask()), ask())
        assert (len(prefill.prefills), len(like.decodes), len(unlike.decodes)) == (1, 1, 1)


# -- lost workers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", [Act.FAIL, Act.DIE])
async def test_a_lost_prefill_worker_is_replaced_by_another(two_pairs, act):
    whoever_is_first(two_pairs.workers.prefill, "prefill", Fault(act))
    check(await collect(two_pairs, ask()), ask())
    assert [len(w.prefills) for w in two_pairs.workers.prefill] == [1, 1]
    assert two_pairs.slept == []


async def test_without_another_prefill_worker_decode_computes_the_prompt(pair):
    pair.workers.prefill[0].faults["prefill"].append(Fault(Act.DIE))
    check(await collect(pair, ask()), ask())
    assert pair.workers.decode[0].decodes[0].num_generated == 0


@pytest.mark.parametrize("act", [Act.FAIL, Act.DIE, Act.END])
@pytest.mark.parametrize("after", [1, 5, _NUM_TOKENS - 2])
async def test_a_stream_survives_its_decode_worker(two_pairs, act, after):
    whoever_is_first(two_pairs.workers.decode, "decode", Fault(act, after_tokens=after))
    events = await collect(two_pairs, ask())
    check(events, ask())
    calls = [w.decodes for w in two_pairs.workers.decode]
    assert [len(decodes) for decodes in calls] == [1, 1]
    assert sorted(decodes[0].num_generated for decodes in calls) == [1, 1 + after]
    assert {decodes[0].sampling.seed for decodes in calls} == {7}
    assert events[-1].timing.resumed == 1
    assert two_pairs.slept == []


@pytest.fixture
async def frozen_pairs() -> AsyncGenerator[ScriptedFleet, None]:
    async with scripted_fleet(prefill=2, decode=2, status_timeout_seconds=0.2) as fleet:
        yield fleet


async def freeze_whoever_hangs(workers: list[ScriptedWorker]) -> ScriptedWorker:
    reached = [asyncio.create_task(w.fault_reached.wait()) for w in workers]
    await asyncio.wait(reached, return_when=asyncio.FIRST_COMPLETED)
    for task in reached:
        task.cancel()
    frozen = next(w for w in workers if w.fault_reached.is_set())
    frozen.mute = True
    return frozen


@pytest.mark.parametrize("after", [0, 1, 5])
async def test_a_stream_leaves_a_decode_worker_that_is_frozen(frozen_pairs, after):
    workers = frozen_pairs.workers.decode
    whoever_is_first(workers, "decode", Fault(Act.HANG, after_tokens=after))
    task = asyncio.create_task(collect(frozen_pairs, ask()))
    frozen = await freeze_whoever_hangs(workers)
    events = await task
    check(events, ask())
    assert [len(w.decodes) for w in workers] == [1, 1]
    assert events[-1].timing.resumed == 1
    frozen.mute = False


@pytest.mark.parametrize("after", [0, 1, 5])
async def test_a_stream_leaves_a_worker_that_answers_and_computes_no_step(two_pairs, after):
    workers = two_pairs.workers.decode
    whoever_is_first(workers, "decode", Fault(Act.HANG, after_tokens=after))
    task = asyncio.create_task(collect(two_pairs, ask()))
    reached = [asyncio.create_task(w.fault_reached.wait()) for w in workers]
    await asyncio.wait(reached, return_when=asyncio.FIRST_COMPLETED)
    for waiting in reached:
        waiting.cancel()
    stalled = next(w for w in workers if w.fault_reached.is_set())
    stalled.num_steps, stalled.running = 9, 1
    events = await task
    check(events, ask())
    assert [len(w.decodes) for w in workers] == [1, 1]
    assert events[-1].timing.resumed == 1
    (why,) = [view.why_not for view in two_pairs.fleet.views() if view.endpoint.address == stalled.address]
    assert why.startswith("its engine has made no steps for ")
    stalled.num_steps = 10
    await two_pairs.fleet.wait_until(lambda fleet: all(view.takes_work for view in fleet.views()))
    stalled.running = 0


async def test_a_frozen_prefill_worker_is_replaced_and_its_answer_released(frozen_pairs):
    workers = frozen_pairs.workers.prefill
    whoever_is_first(workers, "prefill", Fault(Act.LOSE_ANSWER))
    task = asyncio.create_task(collect(frozen_pairs, ask()))
    frozen = await freeze_whoever_hangs(workers)
    check(await task, ask())
    assert [len(w.prefills) for w in workers] == [1, 1]
    frozen.mute = False
    await frozen_pairs.idle()
    assert [ticket for ticket, _ in frozen_pairs.workers.offers.released] == [frozen.prefills[0].ticket_id]


async def test_a_cancelled_request_of_a_frozen_worker_is_not_retried(frozen_pairs):
    workers = frozen_pairs.workers.decode
    whoever_is_first(workers, "decode", Fault(Act.HANG, after_tokens=2))
    task = asyncio.create_task(collect(frozen_pairs, ask()))
    frozen = await freeze_whoever_hangs(workers)
    for held in [held for member in frozen_pairs.fleet._members for held in member.held]:
        held.lose("does not answer")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    frozen.mute = False
    assert sorted(len(w.decodes) for w in workers) == [0, 1]


async def test_a_worker_too_busy_to_answer_keeps_the_streams_whose_tokens_come():
    async with scripted_fleet(prefill=1, decode=1, status_timeout_seconds=0.2) as fleet:
        worker = fleet.workers.decode[0]

        async def once_a_look() -> None:
            seen = fleet.fleet.num_polls
            await fleet.fleet.wait_until(lambda f: f.num_polls > seen)

        worker.step = once_a_look
        async with aclosing(fleet.dispatcher.stream(ask())) as events:
            got = [await anext(events), await anext(events)]
            worker.mute = True
            await fleet.fleet.wait_until(lambda f: not f.views()[1].takes_work)
            got += [event async for event in events]
        check(got, ask())
        assert len(worker.decodes) == 1
        worker.mute = False


async def test_a_stream_waits_for_the_return_of_its_only_decode_worker(pair):
    worker = pair.workers.decode[0]
    worker.faults["decode"].append(Fault(Act.DIE, after_tokens=3))
    task = asyncio.create_task(collect(pair, ask()))
    await worker.fault_reached.wait()
    await worker.wait_idle()
    await pair.fleet.wait_until(lambda f: not f.views()[1].takes_work)
    await worker.start()
    check(await task, ask())
    assert worker.decodes[-1].num_generated == 4
    assert worker.decodes[-1].ticket == b""


async def test_a_ticket_is_given_to_another_decode_worker_when_the_first_never_took_it(two_pairs):
    whoever_is_first(two_pairs.workers.decode, "decode", Fault(Act.FAIL))
    check(await collect(two_pairs, ask()), ask())
    calls = [w.decodes[0] for w in two_pairs.workers.decode]
    assert sorted(d.attempt for d in calls) == [0, 1]
    assert len({d.ticket for d in calls} - {b""}) == 1
    assert two_pairs.workers.offers.released == []


async def test_a_refused_ticket_is_released_and_the_prompt_computed(pair):
    pair.workers.decode[0].faults["decode"].append(Fault(Act.REFUSE_TICKET))
    check(await collect(pair, ask()), ask())
    await pair.idle()
    assert [reason for _, reason in pair.workers.offers.released] == ["decode_failed"]
    assert [bool(d.ticket) for d in pair.workers.decode[0].decodes] == [True, False]


async def test_an_offer_that_decode_did_not_need_is_released(pair):
    pair.workers.decode[0].faults["decode"].append(Fault(Act.LOCAL))
    events = await collect(pair, ask())
    check(events, ask())
    await pair.idle()
    assert [reason for _, reason in pair.workers.offers.released] == ["local"]
    assert events[-1].timing.handoff_outcome == "local"


FAILED_STEPS = {
    "a failed step": Fault(Act.FAIL, error=InvariantBroken("a kernel failed", reason=STEP_FAILED)),
    "a row that is not finite": Fault(Act.FAIL, error=GenerationFailed("a logit is not finite")),
    "a process that ends": Fault(Act.CRASH),
}


@pytest.mark.parametrize("fault", FAILED_STEPS.values(), ids=FAILED_STEPS)
@pytest.mark.parametrize("method", ["prefill", "decode"])
async def test_a_request_in_the_failed_steps_of_two_workers_is_refused(fault, method):
    async with scripted_fleet(prefill=4, decode=4) as fleet:
        workers = getattr(fleet.workers, method)
        for worker in workers:
            worker.faults[method].extend([fault] * 4)
        with pytest.raises(RequestRefused, match="2 workers failed in a row while processing this request"):
            await collect(fleet, ask())
        calls = sum(len(worker.prefills if method == "prefill" else worker.decodes) for worker in workers)
        # grpc may drop the initial metadata of a call whose connection breaks at the same time; the gateway then takes
        # the request as not started, and tries once more.
        assert calls == 2 or (fault.act is Act.CRASH and calls <= len(workers))
        await fleet.workers.idle()


async def test_a_request_that_progresses_between_failed_steps_is_not_refused():
    async with scripted_fleet(prefill=1, decode=2) as fleet:
        shared: deque[Fault | None] = deque(Fault(Act.CRASH, after_tokens=1) for _ in range(6))
        for worker in fleet.workers.decode:
            worker.faults["decode"] = shared
        check(await collect(fleet, ask()), ask())
        assert not shared


async def test_a_request_that_was_not_started_is_no_suspect():
    """A request that waits in the queue while another request's step fails is not the cause, however often this
    happens.
    """
    async with scripted_fleet(prefill=4, decode=1) as fleet:
        for worker in fleet.workers.prefill:
            worker.faults["prefill"].append(Fault(Act.FAIL, error=Unavailable("the engine has stopped")))
        check(await collect(fleet, ask()), ask())


async def test_attempts_are_bounded_and_back_off():
    retry = RetryConfig(max_failures=4, first_backoff_seconds=1.0, max_backoff_seconds=3.0)
    async with scripted_fleet(prefill=1, decode=1, config=DispatchConfig(retry=retry)) as fleet:
        fleet.workers.decode[0].faults["decode"].extend([Fault(Act.FAIL)] * 10)
        with pytest.raises(Unavailable, match="scripted failure"):
            await collect(fleet, ask())
        first, second, third, fourth = fleet.slept
        assert 0.5 <= first <= 1 <= second <= 2
        assert 1.5 <= min(third, fourth) <= max(third, fourth) <= 3


async def test_a_request_without_a_ready_worker_fails_at_once():
    async with scripted_fleet(prefill=1, decode=1) as fleet:
        fleet.workers.decode[0].draining = True
        await fleet.fleet.wait_until(lambda f: not f.views()[1].takes_work)
        with pytest.raises(Unavailable, match="no workers accept requests") as caught:
            await collect(fleet, ask())
        assert caught.value.retry_after_seconds
        assert fleet.slept == []


async def test_a_request_waits_for_a_worker_that_is_just_coming_back(pair):
    worker = pair.workers.decode[0]
    worker.ready = False
    await pair.fleet.wait_until(lambda f: not f.views()[1].takes_work)
    task = asyncio.create_task(collect(pair, ask()))
    seen = pair.fleet.num_polls
    await pair.fleet.wait_until(lambda f: f.num_polls > seen + 4)
    assert not task.done()
    worker.ready = True
    check(await task, ask())


async def test_the_wait_for_a_worker_is_short():
    retry = RetryConfig(first_worker_seconds=0.1)
    async with scripted_fleet(prefill=1, decode=1, config=DispatchConfig(retry=retry)) as fleet:
        fleet.workers.decode[0].ready = False
        await fleet.fleet.wait_until(lambda f: not f.views()[1].takes_work)
        with pytest.raises(Unavailable, match="no workers accept requests"):
            await collect(fleet, ask())
        assert fleet.slept == []


async def test_a_request_without_a_configured_worker_fails_at_once():
    async with scripted_fleet(prefill=1) as fleet:
        async with asyncio.timeout(1):
            with pytest.raises(Unavailable, match="no workers accept requests"):
                await collect(fleet, ask())


async def test_full_workers_are_reported_as_overload():
    async with scripted_fleet(both=2) as fleet:
        full = Overloaded("no blocks", retry_after_seconds=3.0)
        for worker in fleet.workers.both:
            worker.faults["decode"].append(Fault(Act.FAIL, error=full))
        with pytest.raises(Overloaded, match="no blocks") as caught:
            await collect(fleet, ask())
        assert caught.value.retry_after_seconds == 3.0
        assert all(view.takes_work for view in fleet.fleet.views())


async def test_an_offer_survives_decode_workers_that_are_full(pair):
    worker = pair.workers.decode[0]
    worker.faults["decode"].extend([Fault(Act.FAIL, error=Overloaded("no blocks"))] * 5)
    check(await collect(pair, ask()), ask())
    assert [d.attempt for d in worker.decodes] == [0, 1, 2, 3, 4, 5]
    assert len({d.ticket for d in worker.decodes} - {b""}) == 1
    assert len(pair.slept) == 5


async def test_an_offer_is_given_up_when_it_costs_too_many_decode_workers(pair):
    worker = pair.workers.decode[0]
    worker.faults["decode"].extend([Fault(Act.FAIL)] * 2)
    check(await collect(pair, ask()), ask())
    await pair.idle()
    assert [bool(d.ticket) for d in worker.decodes] == [True, True, False]
    assert [reason for _, reason in pair.workers.offers.released] == ["decode_failed"]


async def test_errors_that_every_worker_would_return_are_not_retried(pair):
    fault = Fault(Act.FAIL, error=InvalidRequest("no such token", field="logit_bias"))
    pair.workers.prefill[0].faults["prefill"].append(fault)
    with pytest.raises(InvalidRequest, match="no such token"):
        await collect(pair, ask())
    assert len(pair.workers.prefill[0].prefills) == 1


@pytest.mark.parametrize("reason", sorted(ENDS_OUTPUT))
async def test_a_request_whose_output_cannot_continue_fails_with_its_own_error(pair, reason):
    """A 503 would make clients send again what fails again."""
    error = InvalidRequest("the output cannot continue", field="constraint", reason=reason)
    pair.workers.decode[0].faults["decode"].append(Fault(Act.FAIL, after_tokens=2, error=error))
    with pytest.raises(InvalidRequest, match="cannot continue") as caught:
        await collect(pair, ask())
    assert caught.value.reason == reason
    assert len(pair.workers.decode[0].decodes) == 1


async def test_an_error_of_a_request_that_was_valid_before_is_the_workers(pair):
    error = InvalidRequest("no such token", field="logit_bias")
    pair.workers.decode[0].faults["decode"].append(Fault(Act.FAIL, after_tokens=2, error=error))
    with pytest.raises(Unavailable, match="no worker could finish the stream: no such token"):
        await collect(pair, ask())


async def test_streams_are_bounded():
    async with scripted_fleet(both=1, config=DispatchConfig(max_streams=1)) as fleet:
        async with aclosing(fleet.dispatcher.stream(ask())) as events:
            await anext(events)
            with pytest.raises(Overloaded, match="1 streams are open"):
                await collect(fleet, ask())
        await fleet.idle()
        check(await collect(fleet, ask()), ask())


# -- clients that leave ------------------------------------------------------------------------------------------------


async def leave_when(fleet: ScriptedFleet, reached: asyncio.Event) -> None:
    task = asyncio.create_task(collect(fleet, ask()))
    await asyncio.wait_for(reached.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_leaving_during_prefill_cancels_it(pair):
    worker = pair.workers.prefill[0]
    worker.faults["prefill"].append(Fault(Act.HANG))
    await leave_when(pair, worker.fault_reached)
    await pair.idle()
    assert pair.workers.decode[0].decodes == []


async def test_leaving_while_the_answer_of_prefill_is_on_its_way_releases_the_offer(pair):
    worker = pair.workers.prefill[0]
    worker.faults["prefill"].append(Fault(Act.LOSE_ANSWER))
    await leave_when(pair, worker.fault_reached)
    await pair.idle()
    assert [ticket for ticket, _ in pair.workers.offers.released] == [worker.prefills[0].ticket_id]


async def test_a_deadline_while_the_answer_of_prefill_is_on_its_way_releases_the_offer(pair):
    pair.workers.prefill[0].faults["prefill"].append(Fault(Act.LOSE_ANSWER))
    with pytest.raises(DeadlinePassed):
        await collect(pair, ask(seconds=0.3))
    await pair.idle()


async def test_leaving_with_the_first_token_releases_the_offer(pair):
    async with aclosing(pair.dispatcher.stream(ask())) as events:
        await anext(events)
        assert pair.workers.offers.open
    await pair.idle()
    assert [reason for _, reason in pair.workers.offers.released] == ["client_gone"]


async def test_leaving_before_decode_took_the_ticket_releases_the_offer(pair):
    worker = pair.workers.decode[0]
    worker.faults["decode"].append(Fault(Act.HANG))
    await leave_when(pair, worker.fault_reached)
    await pair.idle()
    assert [reason for _, reason in pair.workers.offers.released] == ["client_gone"]


async def test_leaving_in_the_middle_of_decode_cancels_it(pair):
    worker = pair.workers.decode[0]
    worker.faults["decode"].append(Fault(Act.HANG, after_tokens=4))
    arrived = asyncio.Event()

    async def read() -> None:
        count = 0
        async for event in pair.dispatcher.stream(ask()):
            count += len(event.tokens)
            if count >= 5:  # the first token and the four of the decode worker: the hand-off is complete
                arrived.set()

    task = asyncio.create_task(read())
    await asyncio.wait_for(arrived.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await pair.idle()
    assert pair.workers.offers.released == []


async def test_leaving_between_two_attempts_releases_the_ticket_only(pair):
    waiting = asyncio.Event()

    async def sleep(seconds: float) -> None:
        waiting.set()
        await asyncio.Event().wait()

    pair.dispatcher._sleep = sleep
    pair.workers.decode[0].faults["decode"].extend([Fault(Act.FAIL), Fault(Act.FAIL)])
    await leave_when(pair, waiting)


@pytest.mark.parametrize("method", ["prefill", "decode"])
@pytest.mark.parametrize("after", [0, 2])
async def test_a_deadline_ends_a_hanging_call(pair, method, after):
    worker = pair.workers.prefill[0] if method == "prefill" else pair.workers.decode[0]
    worker.faults[method].append(Fault(Act.HANG, after_tokens=after))
    with pytest.raises(DeadlinePassed, match="of 12 tokens"):
        await collect(pair, ask(seconds=0.3))


async def test_a_passed_deadline_calls_no_worker(pair):
    with pytest.raises(DeadlinePassed, match="after 0 of 12"):
        await collect(pair, ask(seconds=-1.0))
    assert pair.workers.prefill[0].prefills == []


async def test_tokens_are_counted_while_they_arrive(pair):
    def count(name: str) -> float | None:
        return pair.instruments.registry.get_sample_value(f"kvferry_gateway_{name}")

    names = ("prompt_tokens_total", "time_to_first_token_seconds_count", "output_tokens_total")
    request = ask()
    async with aclosing(pair.dispatcher.stream(request)) as events:
        assert [count(name) for name in names] == [0, 0, 0]
        for number in range(1, 4):
            await anext(events)
            assert [count(name) for name in names] == [len(request.token_ids), 1, number]
    await pair.idle()


async def test_streams_are_counted_by_how_they_end(pair):
    await collect(pair, ask())
    async with aclosing(pair.dispatcher.stream(ask())) as events:
        await anext(events)
    await pair.idle()

    def count(outcome: str) -> float | None:
        return pair.instruments.registry.get_sample_value("kvferry_gateway_streams_total", {"outcome": outcome})

    assert (count("done"), count("cancelled")) == (1, 1)
    assert pair.instruments.registry.get_sample_value("kvferry_gateway_output_tokens_total") == _NUM_TOKENS + 1


@pytest.mark.parametrize(
    ("method", "fault"),
    [("prefill", None), ("prefill", Fault(Act.CRASH)), ("decode", Fault(Act.CRASH)), ("decode", Fault(Act.CRASH, 4))],
    ids=["no fault", "prefill crashes", "decode crashes", "decode crashes later"],
)
async def test_log_probabilities_of_the_prompt_come_once(two_pairs, method, fault):
    sampling = SamplingParams(max_tokens=_NUM_TOKENS, seed=7, prompt_logprobs=2)
    if fault is not None:
        workers = two_pairs.workers.prefill if method == "prefill" else two_pairs.workers.decode
        whoever_is_first(workers, method, fault)
    request = ask(sampling=sampling)
    events = await collect(two_pairs, request)
    check(events, request)
    expected = scores_of(_PROMPT, sampling)
    assert [event.prompt_logprobs for event in events] == [expected, *[None] * (len(events) - 1)]
    decodes = [call for worker in two_pairs.workers.decode for call in worker.decodes]
    assert decodes
    assert not any(call.sampling.HasField("prompt_logprobs") for call in decodes), (
        "the log-probabilities came with the first token"
    )


async def test_a_decode_worker_that_computes_the_prompt_gives_its_log_probabilities():
    sampling = SamplingParams(max_tokens=_NUM_TOKENS, seed=7, prompt_logprobs=0)
    async with scripted_fleet(both=1) as fleet:
        events = await collect(fleet, ask(sampling=sampling))
        assert [event.prompt_logprobs for event in events if event.prompt_logprobs] == [scores_of(_PROMPT, sampling)]
        assert events[0].prompt_logprobs is not None
