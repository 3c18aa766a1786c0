"""Admission reserves the pages that admitted prompts still need, so long prompts do not preempt each other."""

from harness.fakes.engines import (
    ArithmeticRunner,
    a_request,
    an_engine,
    expected_tokens,
    run_until_idle,
    shares,
    small_limits,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.engine import Engine


def test_a_second_long_prompt_waits_for_the_pages_reserved_for_the_first() -> None:
    # Ten pages of 4 tokens. Each prompt needs 6 pages; after the first chunk each has 2, so 6 pages would be free for
    # both.
    engine, runner = an_engine(num_blocks=10, limits=small_limits(token_budget=16, max_chunk_tokens=8))
    one, two = list(range(24)), list(range(40, 64))
    engine.add(a_request("one", one, max_tokens=1))
    engine.add(a_request("two", two, max_tokens=1))
    tokens = run_until_idle(engine)
    assert tokens == {"one": expected_tokens(one, 1), "two": expected_tokens(two, 1)}
    assert engine.scheduler.num_preemptions == 0
    assert shares(runner) == [*[[("one", 8)]] * 3, *[[("two", 8)]] * 3]


def test_a_prompt_that_fits_beside_the_reserved_pages_is_admitted_at_once() -> None:
    engine, runner = an_engine(num_blocks=12, limits=small_limits(token_budget=16, max_chunk_tokens=8))
    engine.add(a_request("one", list(range(24)), max_tokens=1))
    engine.add(a_request("two", list(range(40, 64)), max_tokens=1))
    run_until_idle(engine)
    assert shares(runner) == [[("one", 8), ("two", 8)]] * 3


def test_shared_pages_of_a_cached_prefix_are_reserved_once() -> None:
    engine, runner = an_engine(num_blocks=12, limits=small_limits(token_budget=24, max_chunk_tokens=8))
    prefix = list(range(16))
    engine.add(a_request("warm", [*prefix, 1], max_tokens=1))
    run_until_idle(engine)
    steps = len(runner.steps)
    for name in ("one", "two"):  # four pages are shared, and each prompt has four more
        engine.add(a_request(name, [*prefix, *[ord(name[0]) % 90] * 16], max_tokens=1))
    run_until_idle(engine)
    assert shares(runner)[steps:] == [[("one", 8), ("two", 8)]] * 2
    assert engine.scheduler.num_preemptions == 0


@st.composite
def long_prompts(draw: st.DrawFn) -> tuple[Engine, ArithmeticRunner, list[list[int]]]:
    num_blocks = draw(st.integers(4, 12))
    prefix = draw(st.lists(st.integers(0, 5), max_size=8))
    longest = num_blocks * 4 - 1 - len(prefix)
    tails = draw(st.lists(st.integers(1, longest), min_size=2, max_size=6))
    prompts = [[*prefix, *[(10 + i + 3 * j) % 96 for j in range(length)]] for i, length in enumerate(tails)]
    chunk = draw(st.integers(1, 12))
    budget = draw(st.integers(chunk, 40))
    bounds = small_limits(token_budget=budget, max_chunk_tokens=chunk, max_num_seqs=draw(st.integers(1, 8)))
    return *an_engine(num_blocks=num_blocks, limits=bounds), prompts


@settings(max_examples=150, deadline=None)
@given(long_prompts())
def test_prompts_never_preempt_each_other_and_all_end(case: tuple[Engine, ArithmeticRunner, list[list[int]]]) -> None:
    engine, _, prompts = case
    for i, prompt in enumerate(prompts):
        engine.add(a_request(str(i), prompt, max_tokens=1))
    tokens = run_until_idle(engine)
    assert tokens == {str(i): expected_tokens(prompt, 1) for i, prompt in enumerate(prompts)}
    assert engine.scheduler.num_preemptions == 0
    assert engine.is_idle


@settings(max_examples=150, deadline=None)
@given(long_prompts(), st.integers(2, 30))
def test_with_answers_that_grow_all_end_with_their_own_tokens(
    case: tuple[Engine, ArithmeticRunner, list[list[int]]], most: int
) -> None:
    engine, runner, prompts = case
    room = len(runner.pages) * 4
    for i, prompt in enumerate(prompts):
        engine.add(a_request(str(i), prompt, max_tokens=most))
    tokens = run_until_idle(engine)
    for i, prompt in enumerate(prompts):
        assert tokens[str(i)] == expected_tokens(prompt, min(most, room - len(prompt), 128 - len(prompt)))
    assert engine.is_idle
