"""Reset of the prefix cache: blocks cached before it are not used after it, and running requests are not affected."""

from harness.fakes.engines import a_request, an_engine, expected_tokens, run_until_idle, shares

from kvferry.core.ids import BlockId

_PROMPT = list(range(1, 14))


def test_a_prompt_is_computed_again_after_a_reset() -> None:
    engine, runner = an_engine()
    engine.add(a_request("a", _PROMPT, max_tokens=1))
    run_until_idle(engine)
    assert engine.reset_prefix_cache() == 3
    assert engine.reset_prefix_cache() == 0
    removed = engine.step().cache_changes
    assert [change.stored for change in removed] == [None] * 3
    engine.add(a_request("b", _PROMPT, max_tokens=1))
    run_until_idle(engine)
    assert shares(runner) == [[("a", 13)], [("b", 13)]]
    assert engine.is_idle


def test_a_running_request_continues_and_its_earlier_blocks_are_not_cached_again() -> None:
    engine, runner = an_engine()
    engine.add(a_request("a", _PROMPT, max_tokens=9))
    engine.step()
    assert engine.reset_prefix_cache() == 3
    engine.check_integrity()
    engine.add(a_request("b", _PROMPT, max_tokens=2))
    tokens = run_until_idle(engine)
    assert tokens == {"a": expected_tokens(_PROMPT, 9)[1:], "b": expected_tokens(_PROMPT, 2)}
    assert ("b", 13) in shares(runner)[1]
    assert engine.is_idle


def test_free_pages_are_outdated_for_peers_and_held_ones_are_not() -> None:
    engine, _ = an_engine()
    engine.add(a_request("ended", _PROMPT, max_tokens=1))
    run_until_idle(engine)
    engine.add(a_request("running", list(range(40, 50)), max_tokens=9))
    engine.step()
    pool = engine.allocator.pool
    held = [b for b in range(pool.num_blocks) if pool.refs(BlockId(b))]
    before = list(pool.epochs)
    engine.reset_prefix_cache()
    assert [b for b in range(pool.num_blocks) if pool.epochs[b] == before[b]] == held
    run_until_idle(engine)
