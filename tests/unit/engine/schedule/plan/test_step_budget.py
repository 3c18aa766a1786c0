"""The share of prompts in a step: the whole budget if no sequence decodes, otherwise one allowance for all prompts."""

from harness.fakes.engines import a_request, an_engine, run_until_idle, shares, small_limits


def test_decodes_go_on_beside_a_long_prompt() -> None:
    engine, runner = an_engine(limits=small_limits(token_budget=9, max_chunk_tokens=8))
    engine.add(a_request("short", [1, 2, 3], max_tokens=6))
    engine.step()
    engine.add(a_request("long", list(range(40)), max_tokens=1))
    for _ in range(5):
        engine.step()
    assert shares(runner)[1:6] == [[("short", 1), ("long", 8)]] * 5


def test_many_prompts_beside_a_decode_share_one_allowance() -> None:
    """With a chunk for each prompt, the step would take as long as all of these chunks and delay the decode."""
    engine, runner = an_engine(limits=small_limits(max_chunk_tokens=8, max_mixed_tokens=12))
    engine.add(a_request("short", [1, 2, 3], max_tokens=6))
    engine.step()
    for i in range(3):
        engine.add(a_request(f"long-{i}", [i, *range(9)], max_tokens=2))
    for _ in range(4):
        engine.step()
    assert shares(runner)[1:5] == [
        [("short", 1), ("long-0", 6), ("long-1", 3), ("long-2", 3)],
        [("short", 1), ("long-0", 4), ("long-1", 4), ("long-2", 4)],
        [("short", 1), ("long-0", 1), ("long-1", 3), ("long-2", 3)],
        [("short", 1), ("long-1", 1), ("long-2", 1)],
    ]
    run_until_idle(engine)
    assert engine.is_idle


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one() -> None:
    engine, runner = an_engine(limits=small_limits(max_chunk_tokens=8, max_mixed_tokens=8))
    engine.add(a_request("decodes", [1, 2, 3], max_tokens=30))
    engine.step()
    engine.add(a_request("long", list(range(90)), max_tokens=1))
    engine.step()
    assert shares(runner)[-1] == [("decodes", 1), ("long", 8)], "a prompt alone may use the whole allowance"
    engine.add(a_request("short", [7, 8, 9], max_tokens=1))
    engine.step()
    assert shares(runner)[-1] == [("decodes", 1), ("long", 4), ("short", 3)]


def test_prompts_alone_take_the_whole_budget() -> None:
    engine, runner = an_engine(limits=small_limits(max_chunk_tokens=8, max_mixed_tokens=1))
    for i in range(3):
        engine.add(a_request(f"long-{i}", [i, *range(9)], max_tokens=1))
    engine.step()
    assert shares(runner)[0] == [("long-0", 8), ("long-1", 8), ("long-2", 8)]
