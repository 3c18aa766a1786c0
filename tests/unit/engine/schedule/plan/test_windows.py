"""Engines whose layers are in groups: released pages are never read, and hits are complete in every group."""

import random
from dataclasses import dataclass, field

import pytest
from harness.fakes.delayed import QueuedRunner
from harness.fakes.engines import (
    WindowedRunner,
    a_request,
    a_windowed_engine,
    an_engine,
    expected_tokens,
    run_until_idle,
    small_limits,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import InvalidRequest
from kvferry.core.ids import RequestId
from kvferry.engine.engine import Engine
from kvferry.engine.schedule.plan.pipeline import Pipeline
from kvferry.engine.schedule.speculation.settings import parse_speculation
from kvferry.engine.schedule.speculation.speculation import speculation_of


def test_a_long_request_keeps_the_pages_of_its_windows_only() -> None:
    engine, _ = a_windowed_engine((None, 8, 8), num_blocks=100, limits=small_limits(max_chunk_tokens=8))
    prompt = [i % 90 for i in range(100)]
    engine.add(a_request("long", prompt, max_tokens=20))
    held = []
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        held.append(engine.allocator.pool.num_held)
    # 30 blocks with full attention. A window of 8 tokens needs 2 blocks, and a chunk of 8 tokens at most 3 more.
    assert max(held) <= engine.allocator.needs.pages_for(120) == 30 + 2 * (2 + 3)
    assert max(held) > 30
    assert engine.is_idle


def test_a_sequence_that_fits_only_because_windows_pass_is_served() -> None:
    prompt = [i % 90 for i in range(100)]
    engine, _ = a_windowed_engine((None, 8, 8), num_blocks=38, limits=small_limits(max_chunk_tokens=8))
    assert engine.max_model_tokens == 28 * 4
    engine.add(a_request("long", prompt, max_tokens=12))
    assert run_until_idle(engine) == {"long": expected_tokens(prompt, 12)}
    assert engine.scheduler.num_preemptions == 0
    with pytest.raises(InvalidRequest, match="112"):
        engine.add(a_request("longer", [*prompt, *prompt], max_tokens=12))


def test_with_one_window_for_all_layers_the_pool_bounds_no_length() -> None:
    engine, _ = a_windowed_engine((8,), num_blocks=5, limits=small_limits(max_chunk_tokens=8))
    prompt = [i % 90 for i in range(150)]
    engine.add(a_request("long", prompt, max_tokens=50))
    assert engine.max_model_tokens == 256
    assert run_until_idle(engine) == {"long": expected_tokens(prompt, 50)}
    assert engine.scheduler.num_preemptions == 0


def test_a_conversation_continues_from_its_last_full_block() -> None:
    engine, runner = a_windowed_engine((None, 6, 6), num_blocks=200)
    prompt = [i % 90 for i in range(41)]
    engine.add(a_request("first", prompt, max_tokens=10))
    answer = run_until_idle(engine)["first"]
    engine.add(a_request("next", [*prompt, *answer, 3, 1, 4], max_tokens=3))
    steps = len(runner.steps)
    run_until_idle(engine)
    assert runner.steps[steps].scheduled[0].num_computed == 48, "50 tokens have KV: 12 full blocks"


def test_a_prefix_without_the_pages_of_its_window_is_no_hit() -> None:
    """The prefix of 40 tokens is cached with full attention, but its window has been reused: an earlier boundary whose
    window is cached is the hit."""
    engine, runner = a_windowed_engine((None, 8), num_blocks=64, limits=small_limits(max_chunk_tokens=16))
    prompt = [i % 90 for i in range(41)]
    engine.add(a_request("first", prompt, max_tokens=1))
    run_until_idle(engine)
    names = engine.namer("").chain(prompt)
    further = engine.allocator.further_indexes[0]
    assert all(name in further._block_of for name in names)
    further.forget_name(names[8])
    engine.add(a_request("again", prompt, max_tokens=1))
    steps = len(runner.steps)
    run_until_idle(engine)
    assert runner.steps[steps].scheduled[0].num_computed == 32, "block 8 is in the windows of 36 and 40 tokens"


def test_a_failed_sequence_leaves_no_pages_in_the_index() -> None:
    engine, _ = a_windowed_engine((None, 6), num_blocks=64)
    engine.add(a_request("one", list(range(40)), max_tokens=5))
    engine.step()
    sequence = next(iter(engine.scheduler.sequences))
    assert sequence.kv.table.passed == [0, 8], "40 tokens: the window begins with token 35, in block 8"
    assert engine.allocator.further_indexes[0].blocks()
    engine.scheduler.blocks.forget(sequence)
    assert not engine.allocator.index.blocks()
    assert not engine.allocator.further_indexes[0].blocks()


@dataclass
class Case:
    engine: Engine
    runner: WindowedRunner
    prompts: list[list[int]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(1, 5))
    some_window = st.integers(1, 20)
    further = draw(st.lists(some_window, max_size=3))
    windows = (draw(st.one_of(st.none(), some_window)), *further)
    chunk = draw(st.integers(1, 12))
    bounds = small_limits(
        token_budget=draw(st.integers(chunk, 24)), max_chunk_tokens=chunk, max_num_seqs=draw(st.integers(1, 5))
    )
    speculation = speculation_of(parse_speculation(draw(st.sampled_from(["off", "ngram?k=3"]))))
    engine, runner = a_windowed_engine(
        windows, num_blocks=draw(st.integers(12, 60)), block_tokens=size, limits=bounds, speculation=speculation
    )
    prefixes = [[(7 * i + j) % 5 for i in range(draw(st.integers(0, 30)))] for j in range(2)]
    case = Case(engine, runner)
    for _ in range(draw(st.integers(1, 6))):
        prompt = [*draw(st.sampled_from(prefixes)), *draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))]
        count = draw(st.integers(1, 12))
        if len(prompt) + count <= engine.max_model_tokens:
            case.prompts.append(prompt)
            case.counts.append(count)
            case.gaps.append(draw(st.integers(0, 8)))
    return case


@settings(max_examples=200, deadline=None)
@given(cases())
def test_in_any_mixture_rows_read_what_was_computed_for_them(case: Case) -> None:
    """The runner checks all reads; here tokens, references and the bound on pages are checked."""
    engine, waiting = case.engine, list(range(len(case.prompts)))
    tokens: dict[str, list[int]] = {}
    for _ in range(3000):
        if waiting and case.gaps[waiting[0]] <= 0:
            number = waiting.pop(0)
            engine.add(a_request(str(number), case.prompts[number], max_tokens=case.counts[number]))
        elif waiting:
            case.gaps[waiting[0]] -= 1
        if not engine.has_work and not waiting:
            break
        for update in engine.step().updates:
            tokens.setdefault(update.request_id, []).extend(t.token_id for t in update.tokens)
        engine.check_integrity()
        for sequence in engine.scheduler.sequences:
            num_drafted = 4  # draft tokens hold pages only if other sequences do not need them
            bound = engine.allocator.needs.pages_for(sequence.num_tokens + num_drafted)
            assert len(sequence.kv.table.pages) <= bound + num_drafted * len(engine.allocator.windows)
    assert engine.is_idle
    inputs = zip(case.prompts, case.counts, strict=True)
    assert tokens == {str(i): expected_tokens(p, n) for i, (p, n) in enumerate(inputs)}


def test_pages_of_all_groups_are_in_quarantine_while_a_step_ahead_may_write_them() -> None:
    engine, _ = an_engine(windows=(None, 6, 6))
    runner = QueuedRunner(64, 4, random.Random(0), (None, 6, 6))
    engine._pipeline = Pipeline(runner, engine.allocator)
    engine.add(a_request("one", list(range(21)), max_tokens=20))
    engine.step()
    assert engine.runs_ahead
    assert runner.num_ahead == 1, "the step after the prompt's was launched"
    engine.abort(RequestId("one"))
    assert engine.allocator.pool.num_quarantined == 3
    engine.step()
    engine.check_integrity()
    assert engine.allocator.pool.num_quarantined == 0
