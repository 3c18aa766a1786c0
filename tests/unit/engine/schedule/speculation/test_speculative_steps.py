"""Steps with drafts give the tokens of steps without drafts, for any proposer and any interleaving in the scheduler.

The runner derives tokens from the KV that it reads, so a rejected draft token that stays in the KV changes the output.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
from harness.drafts.proposers import Oracle, TickingClock
from harness.fakes.engines import (
    a_request,
    an_engine,
    expected_tokens,
    next_allowed,
    next_token,
    run_until_idle,
    small_limits,
)
from harness.fakes.heads import eagle_drafts
from harness.fakes.masks import allowed_after, constrained, with_constraint

from kvferry.core.ids import RequestId
from kvferry.engine.engine import Engine
from kvferry.engine.schedule.speculation.draft_lengths import Lengths, PayingDrafts, WholeDrafts
from kvferry.engine.schedule.speculation.settings import parse_speculation
from kvferry.engine.schedule.speculation.speculation import Speculation, speculation_of
from kvferry.engine.schedule.step.step import StepResult


def speculating(wrong: Callable[[], bool], lengths: Lengths | None = None, num_drafts: int = 4) -> Speculation:
    return Speculation(Oracle(wrong), lengths or WholeDrafts(), num_drafts=num_drafts)


def is_idle(engine: Engine) -> bool:
    return engine.is_idle and engine.speculation is not None and engine.speculation.is_idle


def test_right_drafts_save_steps() -> None:
    engine, runner = an_engine(speculation=speculating(lambda: False))
    engine.add(a_request("a", [1, 2, 3], max_tokens=21))
    assert run_until_idle(engine) == {"a": expected_tokens([1, 2, 3], 21)}
    assert [plan.num_tokens for plan in runner.steps] == [3, 5, 5, 5, 5]
    assert is_idle(engine)
    assert engine.speculation is not None
    counts = engine.speculation.counts
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (4, 16, 16)
    assert counts.accepted_by_position[:5] == [4, 4, 4, 4, 0]


def test_wrong_drafts_cost_no_token_and_no_block() -> None:
    engine, runner = an_engine(speculation=speculating(lambda: True))
    engine.add(a_request("a", [1, 2, 3], max_tokens=9))
    assert run_until_idle(engine) == {"a": expected_tokens([1, 2, 3], 9)}
    assert len(runner.steps) == 9
    assert engine.speculation is not None
    assert engine.speculation.counts.num_accepted_tokens == 0


def test_rejected_drafts_are_in_no_named_block() -> None:
    engine, _ = an_engine(block_tokens=4, speculation=speculating(lambda: True, num_drafts=8))
    engine.add(a_request("a", [1, 2, 3], max_tokens=12))
    while engine.has_work:
        engine.step()
        sequences = list(engine.scheduler._admitted.running)
        for sequence in sequences:
            assert sequence.kv.num_listed <= sequence.kv.num_computed // 4
            assert sequence.kv.num_computed <= sequence.num_tokens - 1
    engine.add(a_request("b", [1, 2, 3, *expected_tokens([1, 2, 3], 10)], max_tokens=6))  # hits blocks of request a
    prompt = [1, 2, 3, *expected_tokens([1, 2, 3], 10)]
    assert run_until_idle(engine)["b"] == expected_tokens(prompt, 6)


def test_a_draft_never_passes_the_limit_of_tokens() -> None:
    for limit in range(1, 8):
        engine, runner = an_engine(speculation=speculating(lambda: False, num_drafts=8))
        engine.add(a_request("a", [1, 2], max_tokens=limit))
        assert run_until_idle(engine) == {"a": expected_tokens([1, 2], limit)}
        assert all(s.num_computed + s.num_scheduled <= 1 + limit for plan in runner.steps for s in plan.scheduled)


def test_all_rows_of_a_step_have_the_same_bans() -> None:
    engine, runner = an_engine(speculation=speculating(lambda: False, num_drafts=8))
    request = a_request("a", [1, 2, 3], max_tokens=20)
    engine.add(replace(request, sampling=replace(request.sampling, min_tokens=7)))
    run_until_idle(engine)
    banned = [s for plan in runner.steps for s in plan.scheduled if s.banned_token_ids and s.num_drafts]
    assert banned
    assert all(len(s.token_ids) - s.num_prompt < 7 for s in banned)
    assert any(s.num_drafts == 8 for plan in runner.steps for s in plan.scheduled if not s.banned_token_ids)


def test_a_postponed_sequence_computes_its_drafts_again() -> None:
    engine, _ = an_engine(speculation=speculating(lambda: False))
    engine.add(a_request("a", [1, 2, 3], max_tokens=9))
    engine.step()
    plan = engine.scheduler.schedule()
    assert plan.scheduled[0].num_drafts == 4
    engine.scheduler.update(plan, StepResult({}, postponed=frozenset({RequestId("a")})))
    assert engine.scheduler._admitted.running[0].kv.num_computed == 3
    assert run_until_idle(engine) == {"a": expected_tokens([1, 2, 3], 9)[1:]}


def test_drafts_take_no_page_that_others_need() -> None:
    engine, _ = an_engine(num_blocks=4, block_tokens=4, speculation=speculating(lambda: True, num_drafts=8))
    engine.add(a_request("a", [1, 2, 3], max_tokens=5))
    engine.add(a_request("b", [4, 5, 6], max_tokens=5))
    tokens = run_until_idle(engine)
    assert tokens == {"a": expected_tokens([1, 2, 3], 5), "b": expected_tokens([4, 5, 6], 5)}
    assert engine.scheduler.num_preemptions == 0


def test_no_draft_beside_prompts() -> None:
    limits = small_limits(max_chunk_tokens=4)
    engine, runner = an_engine(limits=limits, speculation=speculating(lambda: False))
    engine.add(a_request("a", [1, 2, 3], max_tokens=12))
    engine.step()
    engine.add(a_request("b", list(range(12)), max_tokens=1))
    run_until_idle(engine)
    for plan in runner.steps:
        if any(not s.is_decode for s in plan.scheduled):
            assert all(s.num_drafts == 0 for s in plan.scheduled)


def test_a_prefill_worker_drafts_nothing() -> None:
    engine, runner = an_engine(speculation=speculating(lambda: False))
    engine.add(a_request("a", [1, 2, 3], exports=True))
    output = engine.step()
    assert all(s.num_drafts == 0 for plan in runner.steps for s in plan.scheduled)
    engine.release_export(output.exports[RequestId("a")])
    assert is_idle(engine)


def test_lengths_fall_to_zero_while_drafts_are_wrong_and_rise_again_when_they_are_right() -> None:
    lies = True
    speculation = speculating(lambda: lies, PayingDrafts())
    engine, runner = an_engine(num_blocks=128, max_model_tokens=400, speculation=speculation, clock=TickingClock())
    engine.add(a_request("a", [1, 2, 3], max_tokens=300))
    for _ in range(60):
        engine.step()
    assert all(s.num_drafts == 0 for plan in runner.steps[-20:] for s in plan.scheduled)
    lies = False  # unverified proposals are compared with the sampled tokens
    for _ in range(60):
        engine.step()
    assert any(s.num_drafts > 0 for plan in runner.steps[-20:] for s in plan.scheduled)
    run_until_idle(engine)
    assert is_idle(engine)


def test_drafts_come_from_the_text_where_a_head_does_not_pay() -> None:
    head = eagle_drafts(lambda: True, 40)
    head.is_measured = True
    for rows in range(1, 9):
        head.prices.observe(rows, 1.0)  # seconds per step of the head, far more than a step of the engine takes
    speculation = Speculation(Oracle(lambda: False), PayingDrafts(), num_drafts=4, draft_model=head)
    engine, runner = an_engine(speculation=speculation, clock=TickingClock())
    runner.has_head = True
    engine.add(a_request("a", [1, 2, 3], max_tokens=40))
    engine.step()
    assert speculation.may_draft(engine.scheduler._admitted.running, 1), (
        "the next step is not launched ahead, so that it can have a draft"
    )
    assert run_until_idle(engine)["a"] == expected_tokens([1, 2, 3], 40)[1:]
    assert speculation.counts.num_accepted_tokens > 20


def test_tokens_under_a_constraint_are_those_without_drafts() -> None:
    def expected(prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(next_allowed(next_token(tokens), allowed_after(tokens[len(prompt) :])))
        return tokens[len(prompt) :]

    for schedule in ([0], [0, 2, 0, 1], [3]):
        engine, runner = an_engine(speculation=speculating(lambda: False))
        constrained(engine, schedule)
        engine.add(with_constraint(a_request("a", [1, 2, 3], max_tokens=24)))
        assert run_until_idle(engine) == {"a": expected([1, 2, 3], 24)}
        assert is_idle(engine)
        if schedule == [0]:
            assert any(s.num_drafts for plan in runner.steps for s in plan.scheduled)


@pytest.mark.parametrize("method", ["auto", "suffix", "ngram?k=3&min=1"])
def test_each_method_with_repetitive_prompts(method: str) -> None:
    speculation = speculation_of(parse_speculation(method))
    engine, _ = an_engine(num_blocks=128, max_model_tokens=256, speculation=speculation)
    prompts = {name: [i, 7, 8, 9] * 5 for i, name in enumerate("abc")}
    for name, prompt in prompts.items():
        engine.add(a_request(name, prompt, max_tokens=30))
    assert run_until_idle(engine) == {name: expected_tokens(prompt, 30) for name, prompt in prompts.items()}
    assert is_idle(engine)


def test_method_off_creates_no_speculation() -> None:
    assert speculation_of(parse_speculation("off")) is None
