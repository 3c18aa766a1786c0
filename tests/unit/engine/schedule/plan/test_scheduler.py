"""The scheduler in worked examples, then with random mixes of requests: correct tokens, no leaks."""

import pytest
from harness.fakes.engines import (
    EOS,
    a_request,
    an_engine,
    expected_tokens,
    run_until_idle,
    shares,
    small_limits,
)
from harness.fakes.loaders import HeldLoader
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import InvalidRequest, InvariantBroken, Overloaded
from kvferry.core.ids import RequestId
from kvferry.core.sampling import MAX_PRIORITY, FinishReason, SampledToken, SamplingParams
from kvferry.core.settings.engine import SCHEDULING_POLICIES, SchedulerLimits
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.step.kv_progress import RemoteKv
from kvferry.engine.schedule.step.sequence import Sequence
from kvferry.engine.schedule.step.sequence_request import SequenceRequest
from kvferry.engine.schedule.step.step import StepResult
from kvferry.kv.interface.connector import LoadOutcome, PagesQuiet


def test_a_long_prompt_is_computed_in_chunks_and_draws_only_after_the_last() -> None:
    # Chunked prefill as worked out in "Inside vLLM": threshold 8, block size 4, a prompt of 18 tokens.
    engine, runner = an_engine(limits=small_limits(max_chunk_tokens=8))
    engine.add(a_request("a", list(range(18)), max_tokens=1))
    counters: list[tuple[int, int, bool]] = []
    blocks: list[int] = []
    for _ in range(3):
        output = engine.step()
        counters.append(
            (
                runner.steps[-1].scheduled[0].num_computed,
                runner.steps[-1].scheduled[0].num_scheduled,
                bool(output.updates),
            )
        )
        blocks.append(engine.load().blocks_total - engine.load().blocks_free)
    assert counters == [(0, 8, False), (8, 8, False), (16, 2, True)]
    assert blocks == [2, 4, 0], "two blocks, then four, and all are free at the end"
    assert engine.is_idle


def test_computed_and_known_tokens_advance_as_in_the_table() -> None:
    # Prompt of 10 tokens, budget 4: (computed, known) = (0,10) (4,10) (8,10) (10,10) -> (10,11), then decode.
    engine, runner = an_engine(limits=small_limits(token_budget=4))
    engine.add(a_request("a", list(range(10)), max_tokens=3))
    run_until_idle(engine)
    seen = [(p.scheduled[0].num_computed, p.scheduled[0].num_scheduled, p.scheduled[0].samples) for p in runner.steps]
    assert seen == [(0, 4, False), (4, 4, False), (8, 2, True), (10, 1, True), (11, 1, True)]


def test_a_preempted_sequence_keeps_its_tokens_and_computes_them_in_one_go() -> None:
    engine, runner = an_engine(num_blocks=8, limits=small_limits())
    old, young = list(range(12)), list(range(50, 62))
    engine.add(a_request("old", old, max_tokens=9))
    engine.add(a_request("young", young, max_tokens=9))
    tokens = run_until_idle(engine)
    assert engine.scheduler.num_preemptions > 0
    assert tokens["old"] == expected_tokens(old, 9)
    assert tokens["young"] == expected_tokens(young, 9)
    resumed = [s for p in runner.steps for s in p.scheduled if s.request_id == "young" and s.num_scheduled > 1]
    assert len(resumed) >= 2, "computed once as a prompt, and once more after the preemption"
    assert engine.is_idle


def test_a_shared_prefix_is_computed_once() -> None:
    # "Inside vLLM": block size 4, common prefix of 8 tokens; the second request computes 3 tokens and takes one new
    # block.
    engine, runner = an_engine()
    prefix = [1, 2, 3, 4, 5, 6, 7, 8]
    engine.add(a_request("one", [*prefix, 9, 10, 2], max_tokens=9))
    engine.step()
    assert engine.load().blocks_total - engine.load().blocks_free == 3
    engine.add(a_request("two", [*prefix, 12, 10, 2], max_tokens=1))
    engine.step()
    second = next(s for s in runner.steps[-1].scheduled if s.request_id == "two")
    assert (second.num_computed, second.num_scheduled) == (8, 3)
    shared = second.block_ids or runner.steps[0].scheduled[0].block_ids
    assert shared is not None
    first = next(s for s in runner.steps[-1].scheduled if s.request_id == "one")
    assert [engine.allocator.pool.refs(b) for b in first.block_ids[:2]] == [1, 1], (
        "request two has ended; the other request still holds the shared blocks"
    )
    run_until_idle(engine)
    engine.add(a_request("three", [*prefix, 40], max_tokens=1))
    engine.step()
    assert runner.steps[-1].scheduled[0].num_computed == 8, (
        "freed blocks stay in the prefix index until they are allocated again"
    )


def test_tenants_do_not_share_blocks() -> None:
    engine, runner = an_engine()
    tokens = list(range(9))
    engine.add(a_request("mine", tokens, max_tokens=1, scope="a"))
    run_until_idle(engine)
    engine.add(a_request("yours", tokens, max_tokens=1, scope="b"))
    run_until_idle(engine)
    assert runner.steps[-1].scheduled[0].num_computed == 0


def test_a_prompt_waits_for_its_turn_at_the_allowance_and_a_fetch_does_not() -> None:
    engine, runner = an_engine(limits=small_limits(max_mixed_tokens=1))
    engine.add(a_request("short", [1, 2, 3], max_tokens=9))
    engine.step()
    engine.add(a_request("first", list(range(10, 16)), max_tokens=1))
    engine.step()
    assert shares(runner)[1] == [("short", 1), ("first", 1)]
    assert engine.scheduler.num_waiting == 0
    engine.add(a_request("second", list(range(20, 26)), max_tokens=1))
    engine.step()
    assert shares(runner)[2] == [("short", 1), ("first", 1)]
    assert engine.scheduler.num_waiting == 1, "the first prompt has used the whole allowance"
    engine.abort(RequestId("second"))
    HeldLoader(engine)
    engine.add(remote_request([1, *range(30, 40)]))
    engine.step()
    assert engine.load().loading == 1


def test_the_first_that_does_not_fit_ends_admission() -> None:
    engine, runner = an_engine(num_blocks=8)
    engine.add(a_request("big", list(range(20)), max_tokens=4))
    engine.add(a_request("huge", list(range(30, 54)), max_tokens=4))
    engine.add(a_request("small", [1, 2], max_tokens=1))
    engine.step()
    assert shares(runner)[0] == [("big", 20)], "the small request would fit, but must not overtake the huge one"
    assert set(run_until_idle(engine)) == {"big", "huge", "small"}


def test_an_exporting_sequence_leaves_its_pages_to_the_export() -> None:
    engine, _ = an_engine()
    engine.add(a_request("p", list(range(6)), max_tokens=5, exports=True))
    output = engine.step()
    (update,) = output.updates
    assert update.export is not None
    assert update.finish_reason is None
    assert (update.export.num_tokens, len(update.export.blocks)) == (6, 2)
    number = output.exports[update.request_id]
    engine.check_integrity()
    assert not engine.is_idle
    engine.release_export(number)
    engine.release_export(number)
    assert engine.is_idle


def test_a_sequence_that_ends_with_its_first_token_exports_nothing() -> None:
    engine, _ = an_engine()
    engine.add(a_request("p", list(range(6)), max_tokens=1, exports=True))
    output = engine.step()
    (update,) = output.updates
    assert (update.export, output.exports, update.finish_reason) == (None, {}, FinishReason.LENGTH)
    assert engine.is_idle


def remote_request(tokens: list[int]) -> EngineRequest:
    return a_request("d", tokens, max_tokens=3, num_generated=1, remote=RemoteKv(len(tokens) - 1, "ticket"))


def test_the_decode_side_starts_at_prompt_computed_and_one_more_to_go() -> None:
    engine, runner = an_engine()
    loader = HeldLoader(engine)
    prompt = list(range(10))
    tokens = [*prompt, expected_tokens(prompt, 1)[0]]
    engine.add(remote_request(tokens))
    assert engine.step().ran is False
    assert [(s[2], len(s[3])) for s in loader.started] == [(0, 3)]
    for i, block in enumerate(loader.started[0][3]):  # copies the pages as the transport does
        runner.pages[block][:] = [*tokens[i * 4 : i * 4 + 4], None, None, None, None][:4]
        if i == 2:
            runner.pages[block][2:] = [None, None]
    loader.end(None)
    assert run_until_idle(engine)["d"] == expected_tokens(prompt, 3)[1:]
    assert (runner.steps[0].scheduled[0].num_computed, runner.steps[0].scheduled[0].num_scheduled) == (10, 1)
    assert engine.is_idle


def test_only_the_blocks_that_are_lacking_are_fetched() -> None:
    engine, _ = an_engine()
    loader = HeldLoader(engine)
    prompt = list(range(10))
    engine.add(a_request("warm", prompt[:9], max_tokens=1))
    run_until_idle(engine)
    engine.add(remote_request([*prompt, 5]))
    engine.step()
    assert [(s[2], len(s[3])) for s in loader.started] == [(2, 1)], "blocks 0 and 1 were in the local prefix cache"


def test_a_failed_load_is_computed_instead_and_its_pages_wait_for_the_transport() -> None:
    engine, _ = an_engine()
    loader = HeldLoader(engine)
    prompt = list(range(10))
    tokens = [*prompt, expected_tokens(prompt, 1)[0]]
    engine.add(remote_request(tokens))
    engine.step()
    loader.end("peer gone", quiet=False)
    assert run_until_idle(engine)["d"] == expected_tokens(prompt, 3)[1:]
    assert engine.load().blocks_quarantined == 3
    assert not engine.is_idle
    engine.post(PagesQuiet(loader.started[-1][0]))
    engine.step()
    assert engine.is_idle


def test_when_quarantine_is_full_the_next_request_is_computed_at_once() -> None:
    engine, _ = an_engine(num_blocks=32)
    loader = HeldLoader(engine)
    engine.add(remote_request(list(range(11))))
    engine.step()
    loader.end("stalled", quiet=False)
    run_until_idle(engine)
    assert engine.load().blocks_quarantined == 3
    prompt = list(range(20, 30))
    tokens = [*prompt, expected_tokens(prompt, 1)[0]]
    engine.add(remote_request(tokens))
    engine.step()
    assert len(loader.started) == 1, "the pages of the stalled request fill the quarantine"
    output = engine.step()
    assert "quarantine is full: 3 of" in str(output.loads[0].failure)
    engine.post(PagesQuiet(loader.started[0][0]))
    run_until_idle(engine)
    assert engine.is_idle


def test_an_abort_during_a_load_keeps_the_pages_out_of_use_until_the_transport_is_quiet() -> None:
    engine, _ = an_engine()
    loader = HeldLoader(engine)
    engine.add(remote_request(list(range(11))))
    engine.step()
    assert engine.abort(RequestId("d"))
    assert loader.cancelled == ["d"]
    assert engine.load().blocks_quarantined == 3
    engine.check_integrity()
    loader.end("cancelled")
    engine.step()
    assert engine.is_idle


def test_an_abort_right_after_a_verified_load_leaves_no_named_block_in_quarantine() -> None:
    engine, _ = an_engine()
    loader = HeldLoader(engine)
    engine.add(remote_request(list(range(11))))
    engine.step()
    loader.end(None, quiet=False)
    engine._loads.take_in()
    engine.abort(RequestId("d"))
    engine.check_integrity()
    engine.post(PagesQuiet(loader.started[-1][0]))
    engine.step()
    assert engine.is_idle


def test_a_request_with_a_ticket_computes_when_there_is_no_loader() -> None:
    engine, _ = an_engine()
    prompt = list(range(10))
    engine.add(remote_request([*prompt, expected_tokens(prompt, 1)[0]]))
    assert run_until_idle(engine)["d"] == expected_tokens(prompt, 3)[1:]


@pytest.mark.parametrize(
    ("tokens", "num_generated", "reason"),
    [
        ([], 0, "PROMPT_EMPTY"),
        ([1], 1, "PROMPT_EMPTY"),
        ([1] * 128, 0, "CONTEXT_LENGTH_EXCEEDED"),
        ([97], 0, "INVALID_REQUEST"),
        ([-1], 0, "INVALID_REQUEST"),
    ],
)
def test_requests_that_can_never_run_are_refused_by_name(tokens: list[int], num_generated: int, reason: str) -> None:
    engine, _ = an_engine()
    with pytest.raises(InvalidRequest) as caught:
        engine.add(a_request("bad", tokens, num_generated=num_generated))
    assert caught.value.reason == reason
    assert engine.is_idle


def test_a_random_request_without_a_seed_is_refused_before_it_can_stop_the_engine() -> None:
    engine, _ = an_engine()
    with pytest.raises(InvalidRequest) as caught:
        engine.add(EngineRequest(RequestId("a"), [1, 2], SamplingParams(max_tokens=2)))
    assert caught.value.field == "seed"


def test_a_full_queue_is_refused_with_a_retry_time() -> None:
    engine, _ = an_engine()
    engine._max_waiting = 1
    engine.add(a_request("a", [1]))
    with pytest.raises(Overloaded) as caught:
        engine.add(a_request("b", [1]))
    assert caught.value.retry_after_seconds


def test_an_end_token_ends_a_sequence_unless_it_is_to_be_ignored_or_comes_too_early() -> None:
    engine, runner = an_engine()
    runner.run = lambda plan: StepResult.of(plan.scheduled, [SampledToken(EOS)] * len(plan.scheduled))  # type: ignore[method-assign]
    stop = SamplingParams(temperature=0.0, max_tokens=5)
    ignore = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    engine.add(EngineRequest(RequestId("stop"), [1, 2], stop))
    engine.add(EngineRequest(RequestId("ignore"), [1, 2], ignore))
    tokens = run_until_idle(engine)
    assert (len(tokens["stop"]), len(tokens["ignore"])) == (1, 5)


def test_end_tokens_are_banned_until_min_tokens_are_out() -> None:
    engine, runner = an_engine()
    sampling = SamplingParams(temperature=0.0, max_tokens=4, min_tokens=2, stop_token_ids=(5,))
    engine.add(EngineRequest(RequestId("a"), [1, 2], sampling))
    run_until_idle(engine)
    assert [p.scheduled[0].banned_token_ids for p in runner.steps] == [(EOS, 5), (EOS, 5), (), ()]


def test_a_stop_token_id_stays_in_the_output() -> None:
    prompt = [1, 2, 3]
    stop = expected_tokens(prompt, 3)[2]
    engine, _ = an_engine()
    engine.add(
        EngineRequest(RequestId("a"), prompt, SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=(stop,)))
    )
    assert run_until_idle(engine)["a"] == expected_tokens(prompt, 3)


def test_invalid_results_of_a_runner_stop_the_engine() -> None:
    engine, runner = an_engine()
    engine.add(a_request("a", [1, 2]))
    with pytest.raises(InvariantBroken, match="twice"):
        engine.add(a_request("a", [1, 2]))
    runner.run = lambda plan: StepResult({})  # type: ignore[method-assign]
    with pytest.raises(InvariantBroken, match="num_sampled=1"):
        engine.step()


def test_the_scheduler_refuses_requests_larger_than_the_pool() -> None:
    engine, _ = an_engine(num_blocks=4, block_tokens=4, max_model_tokens=1000)
    assert engine.max_model_tokens == 16, "the engine does not admit more tokens than its pages hold"
    sequence = Sequence(SequenceRequest(RequestId("a"), 1, SamplingParams(), engine.namer(""), 17, frozenset()), [1])
    with pytest.raises(InvariantBroken, match="more pages than the pool has"):
        engine.scheduler.add(sequence)
    assert engine.is_idle


def test_a_spent_budget_leaves_running_sequences_for_the_next_step() -> None:
    # Loads do not count against the budget, so three sequences may run at once where two fit in a step.
    engine, runner = an_engine(limits=small_limits(token_budget=2))
    loader = HeldLoader(engine)
    prompts = {name: [10 * i, 1, 2, 3] for i, name in enumerate("abc")}
    for name, prompt in prompts.items():
        tokens = [*prompt, *expected_tokens(prompt, 1)]
        engine.add(a_request(name, tokens, max_tokens=3, num_generated=1, remote=RemoteKv(4, "ticket")))
    engine.step()
    for job, request_id, _, (block,) in loader.started:
        runner.pages[block] = list(prompts[request_id])
        engine.post(LoadOutcome(request_id, job, None, 1, 0, 0.1))
        engine.post(PagesQuiet(job))
    tokens_of = run_until_idle(engine)
    assert shares(runner) == [[("a", 1), ("b", 1)], [("a", 1), ("b", 1)], [("c", 1)], [("c", 1)]]
    assert tokens_of == {name: expected_tokens(prompt, 3)[1:] for name, prompt in prompts.items()}


def test_results_for_an_aborted_sequence_are_ignored() -> None:
    engine, runner = an_engine()
    for name in "ab":
        engine.add(a_request(name, [1, 2, 3], max_tokens=1))
    plan = engine.scheduler.schedule()
    result = runner.run(plan)
    assert engine.abort(RequestId("a"))
    assert not engine.abort(RequestId("a")), "idempotent"
    assert [u.request_id for u in engine.scheduler.update(plan, result)] == ["b"]
    assert engine.is_idle
    engine.check_integrity()


def test_a_late_result_of_an_abandoned_load_changes_nothing() -> None:
    engine, _ = an_engine()
    assert not engine.scheduler.loaded(RequestId("gone"), 4)
    assert not engine.scheduler.load_failed(RequestId("gone"))
    assert engine.is_idle


@st.composite
def workloads(draw: st.DrawFn) -> tuple[int, SchedulerLimits, list[tuple[list[int], int, int, bool, int]]]:
    num_blocks = draw(st.integers(8, 24))
    bounds = SchedulerLimits(
        token_budget=draw(st.integers(1, 40)),
        max_chunk_tokens=draw(st.integers(1, 20)),
        max_mixed_tokens=draw(st.integers(1, 20)),
        max_num_seqs=draw(st.integers(1, 6)),
        reserve_share=draw(st.sampled_from([0.0, 0.1])),
        scheduling=draw(st.sampled_from(SCHEDULING_POLICIES)),
    )
    prefix = draw(st.lists(st.integers(0, 9), max_size=9))
    requests = draw(
        st.lists(
            st.tuples(
                st.lists(st.integers(0, 9), min_size=1, max_size=12),  # number of prompt tokens after the common prefix
                st.integers(1, 8),  # max_tokens
                st.integers(0, 30),  # step at which the request is aborted, if below 20
                st.booleans(),  # whether the request exports its pages
                st.sampled_from([0, 1, MAX_PRIORITY]),
            ),
            min_size=1,
            max_size=8,
        )
    )
    return num_blocks, bounds, [([*prefix, *tail], *rest) for tail, *rest in requests]


@settings(max_examples=150, deadline=None)
@given(workloads())
def test_any_mix_of_requests_gives_each_its_own_tokens_and_leaks_nothing(
    workload: tuple[int, SchedulerLimits, list[tuple[list[int], int, int, bool, int]]],
) -> None:
    num_blocks, bounds, requests = workload
    engine, _ = an_engine(num_blocks=num_blocks, max_model_tokens=32, limits=bounds)
    tokens: dict[str, list[int]] = {}
    exports: list[int] = []
    for i, (prompt, most, _, exporting, priority) in enumerate(requests):
        engine.add(a_request(str(i), prompt, max_tokens=most, exports=exporting, priority=priority))
    for step in range(3000):
        for i, (_, _, when, _, _) in enumerate(requests):
            if when == step and when < 20:
                engine.abort(RequestId(str(i)))
        output = engine.step()
        engine.check_integrity()
        exports += output.exports.values()
        for update in output.updates:
            tokens.setdefault(update.request_id, []).extend(t.token_id for t in update.tokens)
        if exports and not output.ran:
            engine.release_export(exports.pop(0))
        if not engine.has_work and not exports:
            break
    assert engine.is_idle, engine.load()
    for i, (prompt, most, when, exporting, _) in enumerate(requests):
        got = tokens.get(str(i), [])
        count = 1 if exporting else min(most, 32 - len(prompt))
        assert got == expected_tokens(prompt, count)[: len(got)]
        assert len(got) == count or when < 20
