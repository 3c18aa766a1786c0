"""Log-probabilities of a prompt: each token is scored once, for any chunks, cached blocks, preemptions and
hand-offs.
"""

from dataclasses import replace

import pytest
from harness.fakes.engines import ArithmeticRunner, a_request, an_engine, attach, next_token, small_limits
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import InvalidRequest
from kvferry.core.sampling import MAX_PROMPT_LOGPROBS, SamplingParams, ScoredToken
from kvferry.engine.engine import Engine
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.step.kv_progress import RemoteKv

PROMPT = [(7 * i) % 90 for i in range(21)]


def scored_request(name: str, tokens: list[int], *, max_tokens: int = 4, **more: object) -> EngineRequest:
    plain = a_request(name, tokens, max_tokens=max_tokens)
    return replace(plain, sampling=replace(plain.sampling, prompt_logprobs=0), **more)  # type: ignore[arg-type]


def expected(prompt: list[int]) -> tuple[ScoredToken, ...]:
    return tuple(ScoredToken(prompt[p + 1], -float(next_token(prompt[: p + 1])), p + 1) for p in range(len(prompt) - 1))


def run(engine: Engine) -> dict[str, list[tuple[ScoredToken, ...]]]:
    """Step until the engine is idle; return the scores of each request, one item per update that has them."""
    scores: dict[str, list[tuple[ScoredToken, ...]]] = {}
    for _ in range(10_000):
        if not engine.has_work:
            return scores
        output = engine.step()
        for update in output.updates:
            assert update.error is None
            if update.scores is not None:
                scores.setdefault(update.request_id, []).append(update.scores)
        for number in output.exports.values():
            engine.release_export(number)
        engine.check_integrity()
    raise AssertionError("not idle")


def positions(runner: ArithmeticRunner, name: str) -> list[int]:
    """Return the positions of the scored rows of a request, in the order of steps."""
    return [p for plan in runner.steps for s in plan.scheduled if s.request_id == name for p in s.scored_positions]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    plain=st.lists(st.integers(1, 30), max_size=2),
    rows=st.integers(1, 12),
    chunk=st.integers(1, 12),
)
def test_each_token_is_scored_once_in_any_batch(lengths: list[int], plain: list[int], rows: int, chunk: int) -> None:
    limits = small_limits(max_scored_rows=rows, max_chunk_tokens=chunk)
    engine, runner = an_engine(limits=limits)
    prompts = {f"s{i}": [(i + k) % 90 for k in range(length)] for i, length in enumerate(lengths)}
    for name, prompt in prompts.items():
        engine.add(scored_request(name, prompt))
    for i, length in enumerate(plain):
        engine.add(a_request(f"p{i}", [(i + k) % 90 for k in range(length)]))
    assert run(engine) == {name: [expected(prompt)] for name, prompt in prompts.items()}
    assert max(sum(s.num_scored for s in plan.scheduled) for plan in runner.steps) <= rows
    assert engine.is_idle


def test_prompts_to_be_scored_take_turns_and_do_not_hold_up_others() -> None:
    engine, runner = an_engine(num_blocks=128, limits=small_limits(max_scored_rows=4, token_budget=64))
    names = [f"s{i:03}" for i in range(300)]
    for number, name in enumerate(names):
        engine.add(scored_request(name, [number % 90, *PROMPT[:6]], max_tokens=1))
    engine.add(a_request("plain", [89, *PROMPT[:9]], max_tokens=1))
    engine.step()
    assert {s.request_id for s in runner.steps[0].scheduled} == {"s000", "plain"}
    assert engine.scheduler.num_waiting == 299
    assert sorted(run(engine)) == names
    began: dict[str, int] = {}
    for number, plan in enumerate(runner.steps):
        for scheduled in plan.scheduled:
            began.setdefault(scheduled.request_id, number)
    assert [began[name] for name in names] == sorted(began[name] for name in names)


def test_copies_of_a_prompt_to_be_scored_do_not_wait_for_it() -> None:
    engine, runner = an_engine(limits=small_limits(max_scored_rows=2, token_budget=64, max_chunk_tokens=64))
    engine.add(scored_request("scored", PROMPT, max_tokens=1))
    engine.step()
    engine.add(a_request("copy", PROMPT, max_tokens=1))
    engine.step()
    assert {s.request_id for s in runner.steps[1].scheduled} == {"scored", "copy"}
    assert run(engine) == {"scored": [expected(PROMPT)]}


def test_a_prompt_to_be_scored_displaces_nothing_before_its_turn() -> None:
    limits = small_limits(max_num_seqs=3, max_scored_rows=2, scheduling="priority")
    engine, _ = an_engine(limits=limits)
    engine.add(scored_request("first", PROMPT, max_tokens=1))
    for name, token in (("low", 70), ("lower", 80)):
        engine.add(replace(a_request(name, [token, *PROMPT[:5]], max_tokens=30), priority=5))
    engine.step()
    engine.add(scored_request("second", [60, *PROMPT], max_tokens=1))
    for _ in range(4):
        engine.step()
    assert engine.scheduler.num_preemptions == 0
    assert sorted(run(engine)) == ["first", "second"]
    assert engine.scheduler.num_preemptions <= 1


def test_cached_rows_are_computed_again_and_their_blocks_are_cached() -> None:
    engine, runner = an_engine()
    engine.add(a_request("first", PROMPT))
    run(engine)
    engine.add(scored_request("scored", PROMPT))
    assert run(engine)["scored"] == [expected(PROMPT)]
    assert positions(runner, "scored") == list(range(20))
    fresh, runner = an_engine()
    fresh.add(scored_request("scored", PROMPT))
    run(fresh)
    fresh.add(a_request("later", PROMPT))
    run(fresh)
    assert next(s.num_computed for plan in runner.steps for s in plan.scheduled if s.request_id == "later") == 20


def test_a_preempted_prompt_keeps_its_scores_and_scores_the_rest() -> None:
    # The older sequence takes a page every fourth step, and the pool is full when the scored prompt begins.
    engine, runner = an_engine(num_blocks=9, limits=small_limits(max_scored_rows=2))
    engine.add(a_request("older", [1, 2, 3], max_tokens=20))
    engine.step()
    engine.add(scored_request("scored", PROMPT, max_tokens=2))
    assert run(engine) == {"scored": [expected(PROMPT)]}
    assert engine.scheduler.num_preemptions > 0
    assert positions(runner, "scored") == list(range(20))
    starts = [s.num_computed for plan in runner.steps for s in plan.scheduled if s.request_id == "scored"]
    assert starts != sorted(starts), "it was preempted before all of its rows were scored"


def test_a_sequence_preempted_after_its_first_token_reports_no_score_twice() -> None:
    engine, runner = an_engine(num_blocks=8)
    engine.add(a_request("older", [1, 2, 3], max_tokens=24))
    engine.add(scored_request("scored", PROMPT[:6], max_tokens=20))
    assert run(engine) == {"scored": [expected(PROMPT[:6])]}
    assert engine.scheduler.num_preemptions > 0
    assert positions(runner, "scored") == list(range(5))


def test_a_prefill_worker_reports_the_scores_with_the_first_token() -> None:
    engine, _ = an_engine()
    engine.add(scored_request("p", PROMPT, exports=True))
    assert run(engine) == {"p": [expected(PROMPT)]}


def test_a_resumed_stream_scores_the_prompt_alone() -> None:
    engine, runner = an_engine()
    engine.add(scored_request("d", [*PROMPT, 5, 6], num_generated=2))
    assert run(engine) == {"d": [expected(PROMPT)]}
    assert positions(runner, "d") == list(range(20))
    engine.add(a_request("plain", [*PROMPT, 7], num_generated=1))
    assert run(engine) == {}


def test_kv_of_a_peer_is_not_loaded_for_scored_rows() -> None:
    class NoLoader:
        def start(self, *_: object) -> None:
            raise AssertionError("a load was started")

        def cancel(self, _: object) -> None:
            pass

    engine, runner = an_engine()
    attach(engine, loader=NoLoader())  # type: ignore[arg-type]
    remote = RemoteKv(20, object())
    engine.add(scored_request("d", PROMPT, remote=remote))
    assert run(engine) == {"d": [expected(PROMPT)]}
    assert positions(runner, "d") == list(range(20))
    engine.add(a_request("plain", PROMPT[::-1], remote=remote))
    with pytest.raises(AssertionError, match="a load was started"):
        engine.step()


def test_a_prompt_of_one_token_has_no_scores() -> None:
    engine, _ = an_engine()
    engine.add(scored_request("one", [5]))
    assert run(engine) == {"one": [()]}


def test_the_number_of_log_probabilities_is_bounded() -> None:
    engine, _ = an_engine(num_blocks=2048, max_model_tokens=8000)
    tokens = [5] * (MAX_PROMPT_LOGPROBS // 21 + 1)
    sampling = SamplingParams(temperature=0, prompt_logprobs=20)
    with pytest.raises(InvalidRequest, match="at most 65536 are returned") as caught:
        engine.add(replace(a_request("many", tokens), sampling=sampling))
    assert caught.value.field == "prompt_logprobs"
    engine.add(replace(a_request("enough", tokens[1:]), sampling=sampling))
