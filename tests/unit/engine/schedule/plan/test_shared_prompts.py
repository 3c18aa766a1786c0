"""Prompts that several waiting sequences share: computed once, each sequence gets its own tokens."""

from harness.fakes.engines import a_request, an_engine, expected_tokens, run_until_idle, shares, small_limits
from harness.fakes.loaders import HeldLoader
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.ids import RequestId
from kvferry.engine.schedule.step.kv_progress import RemoteKv

_PROMPT = list(range(1, 19))
"""18 tokens: four full blocks of 4, and a block with two tokens."""


def test_samples_of_one_prompt_compute_it_once() -> None:
    engine, runner = an_engine()
    for name in ("a", "b", "c"):
        engine.add(a_request(name, _PROMPT, max_tokens=3))
    tokens = run_until_idle(engine)
    assert shares(runner)[:2] == [[("a", 18)], [("a", 1), ("b", 2), ("c", 2)]]
    assert tokens == dict.fromkeys("abc", expected_tokens(_PROMPT, 3))
    assert engine.is_idle


def test_a_prompt_that_is_computed_in_chunks_is_followed_to_the_end_of_the_common_prefix() -> None:
    engine, runner = an_engine(limits=small_limits(max_chunk_tokens=8))
    other = [*_PROMPT[:12], *range(60, 70)]
    engine.add(a_request("a", _PROMPT, max_tokens=2))
    engine.add(a_request("b", other, max_tokens=2))
    tokens = run_until_idle(engine)
    assert shares(runner)[:3] == [[("a", 8)], [("a", 8)], [("a", 2), ("b", 8)]]
    assert tokens == {"a": expected_tokens(_PROMPT, 2), "b": expected_tokens(other, 2)}


def test_a_sequence_that_shares_no_full_block_does_not_wait() -> None:
    engine, runner = an_engine()
    engine.add(a_request("a", _PROMPT, max_tokens=1))
    engine.add(a_request("b", [1, 2, 3, 90], max_tokens=1))
    engine.add(a_request("c", _PROMPT, max_tokens=1, scope="another"))
    engine.step()
    assert shares(runner) == [[("a", 18), ("b", 4), ("c", 18)]]


def test_later_requests_overtake_those_that_wait_for_a_block() -> None:
    engine, runner = an_engine(limits=small_limits(max_chunk_tokens=8))
    engine.add(a_request("a", _PROMPT, max_tokens=1))
    engine.add(a_request("b", _PROMPT, max_tokens=1))
    engine.add(a_request("c", list(range(40, 45)), max_tokens=1))
    engine.step()
    assert shares(runner) == [[("a", 8), ("c", 5)]]


def test_when_the_computing_sequence_is_aborted_the_next_one_computes_the_rest() -> None:
    engine, runner = an_engine(limits=small_limits(max_chunk_tokens=8))
    for name in ("a", "b", "c"):
        engine.add(a_request(name, _PROMPT, max_tokens=1))
    engine.step()
    engine.abort(RequestId("a"))
    engine.step()
    assert shares(runner) == [[("a", 8)], [("b", 8)]], (
        "it reuses the first blocks of the aborted sequence from the prefix cache"
    )
    tokens = run_until_idle(engine)
    assert tokens == {"b": expected_tokens(_PROMPT, 1), "c": expected_tokens(_PROMPT, 1)}
    assert engine.is_idle


def test_samples_of_one_prompt_fetch_its_full_blocks_once() -> None:
    engine, runner = an_engine()
    loader = HeldLoader(engine)
    tokens = [*_PROMPT, expected_tokens(_PROMPT, 1)[0]]
    for name in ("a", "b"):
        remote = RemoteKv(len(_PROMPT), "ticket")
        engine.add(a_request(name, tokens, max_tokens=3, num_generated=1, remote=remote))
    engine.step()
    assert [(s[1], s[2], len(s[3])) for s in loader.started] == [("a", 0, 5)]
    for i, block in enumerate(loader.started[0][3]):  # copies the pages as the transport does
        runner.pages[block][:] = [*_PROMPT[i * 4 : i * 4 + 4], None, None, None][:4]
    loader.end(None)
    engine.step()
    assert [(s[1], s[2], len(s[3])) for s in loader.started[1:]] == [("b", 4, 1)], (
        "each further sample computes only the partly filled block"
    )
    runner.pages[loader.started[1][3][0]][:] = [*_PROMPT[16:], None, None]
    loader.end(None)
    tokens_of = run_until_idle(engine)
    assert tokens_of["b"] == expected_tokens(_PROMPT, 3)[1:]
    assert engine.is_idle


def test_scored_prompts_do_not_wait_since_they_compute_every_row() -> None:
    engine, runner = an_engine()
    engine.add(a_request("a", _PROMPT, max_tokens=1))
    engine.add(a_request("b", _PROMPT, max_tokens=1, prompt_logprobs=0))
    engine.step()
    assert shares(runner) == [[("a", 18), ("b", 18)]]


def test_a_burst_of_one_prompt_stays_within_a_bounded_search() -> None:
    engine, runner = an_engine(num_blocks=256, limits=small_limits(max_num_seqs=128))
    for i in range(100):
        engine.add(a_request(str(i), _PROMPT, max_tokens=1))
    tokens = run_until_idle(engine)
    assert shares(runner)[0] == [("0", 18)]
    assert tokens == {str(i): expected_tokens(_PROMPT, 1) for i in range(100)}
    assert sum(count for step in shares(runner) for _, count in step) == 18 + 99 * 2


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20), st.integers(1, 6)), min_size=2, max_size=10),
    st.integers(8, 24),
    st.sampled_from(["fcfs", "priority", "srtf", "two-level", "weighted"]),
)
def test_requests_with_common_prefixes_get_their_own_tokens(
    requests: list[tuple[int, int, int]], num_blocks: int, scheduling: str
) -> None:
    engine, _ = an_engine(
        num_blocks=num_blocks, max_model_tokens=32, limits=small_limits(scheduling=scheduling, max_chunk_tokens=8)
    )
    expected: dict[str, list[int]] = {}
    for i, (common, length, count) in enumerate(requests):
        prompt = [*_PROMPT[: 4 * common], *range(30, 30 + length)][:24]
        engine.add(a_request(str(i), prompt, max_tokens=count, priority=i % 3))
        expected[str(i)] = expected_tokens(prompt, count)
    assert run_until_idle(engine) == expected
    assert engine.is_idle
