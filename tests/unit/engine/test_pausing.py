"""Pauses of an engine, and new weights while it is paused: no request is lost, and no KV of other weights is read."""

from dataclasses import dataclass, field

import pytest
from harness.fakes.engines import VOCAB, a_request, expected_tokens, run_until_idle, shares, small_limits, written_slots
from harness.fakes.engines import an_engine as a_plain_engine
from harness.fakes.small_engine import engine_for
from harness.idle import assert_idle
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import Overloaded, Unavailable
from kvferry.core.ids import BlockId, RequestId
from kvferry.core.pausing import PauseMode, PauseState, WeightVersion, with_version
from kvferry.core.sampling import FinishReason, SampledToken
from kvferry.engine.engine import Engine
from kvferry.engine.schedule.loads.kv_prefetch import KvPrefetchRequest
from kvferry.engine.schedule.messages import NewWeights
from kvferry.engine.schedule.step.kv_jobs import SequenceUpdate
from kvferry.engine.schedule.step.step import StepPlan, StepResult, rows_of

_PROMPT = list(range(1, 14))
_MODES = list(PauseMode)


def _token(tokens: list[int], weights: int) -> int:
    """Return the token that follows `tokens` with these weights."""
    state = 7 + weights
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state % (VOCAB - 1)


class _Runner:
    """A runner whose KV and tokens depend on its weights. It fails if a row reads KV of other weights."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.block_tokens, self.weights = block_tokens, 0
        self.pages: dict[tuple[BlockId, int], tuple[int, int]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for item in plan.scheduled:
            for _, position, page, slot in written_slots(item, self.block_tokens):
                self.pages[page, slot] = (item.token_ids[position], self.weights)
        for item in plan.scheduled:
            for position in range(item.num_computed + item.num_scheduled):
                block, slot = divmod(position, self.block_tokens)
                assert self.pages[item.block_ids[block], slot] == (item.token_ids[position], self.weights)
        rows = [row for item in plan.scheduled if item.num_sampled for row in rows_of(item)]
        sampled = [SampledToken(_token(list(row.token_ids), self.weights)) for row in rows]
        return StepResult.of(plan.scheduled, sampled)


def _an_engine(num_blocks: int = 24) -> tuple[Engine, _Runner]:
    runner = _Runner(num_blocks, 4)
    engine = engine_for(
        runner,
        num_blocks=num_blocks,
        block_tokens=4,
        max_model_tokens=64,
        vocab_size=VOCAB,
        eos_token_ids=(),
        limits=small_limits(),
    )
    return engine, runner


def _change(engine: Engine, runner: _Runner) -> int:
    number = runner.weights + 1

    def install() -> None:
        runner.weights = number

    return engine.change_weights(NewWeights(f"v{number}", bytes([number]) * 16, install))


def test_a_kept_request_stops_between_two_steps_and_continues_with_the_same_tokens() -> None:
    engine, runner = a_plain_engine()
    engine.add(a_request("a", _PROMPT, max_tokens=9))
    engine.step()
    engine.pausing.pause(PauseMode.KEEP)
    engine.add(a_request("b", [5, 6, 7], max_tokens=2))
    assert engine.is_pause_settled
    assert not engine.has_work
    assert engine.step().updates == []
    load = engine.load()
    assert (load.running, load.waiting) == (1, 1)
    assert len(shares(runner)) == 1
    engine.pausing.resume()
    tokens = run_until_idle(engine)
    assert tokens == {"a": expected_tokens(_PROMPT, 9)[1:], "b": expected_tokens([5, 6, 7], 2)}
    assert shares(runner)[1][0] == ("a", 1), "the KV was kept"
    assert_idle(engine)


def test_waiting_lets_running_and_continued_requests_end_and_holds_new_ones() -> None:
    engine, _ = a_plain_engine()
    engine.add(a_request("a", _PROMPT, max_tokens=3))
    engine.pausing.pause(PauseMode.WAIT)
    engine.add(a_request("new", [5, 6, 7], max_tokens=2))
    engine.add(a_request("moved", [*_PROMPT, 9], num_generated=1, max_tokens=3))
    assert not engine.is_pause_settled
    assert set(run_until_idle(engine)) == {"a", "moved"}
    assert engine.is_pause_settled
    engine.pausing.resume()
    assert set(run_until_idle(engine)) == {"new"}
    assert_idle(engine)


def test_aborting_ends_what_runs_with_its_tokens_and_holds_new_requests() -> None:
    engine, _ = a_plain_engine()
    engine.add(a_request("a", _PROMPT, max_tokens=9))
    engine.step()
    engine.add(a_request("queued", [5, 6, 7], max_tokens=2))
    engine.pausing.pause(PauseMode.ABORT)
    engine.add(a_request("new", [8, 9], max_tokens=1))
    engine.add(a_request("moved", [*_PROMPT, 9], num_generated=1, max_tokens=3))
    updates = engine.step().updates
    assert [(u.request_id, u.tokens, u.finish_reason) for u in updates] == [
        (name, (), FinishReason.ABORT) for name in ("a", "queued", "moved")
    ]
    assert engine.is_pause_settled
    engine.pausing.resume()
    assert set(run_until_idle(engine)) == {"new"}
    assert_idle(engine)


def test_the_last_mode_applies_to_all_requests() -> None:
    engine, _ = a_plain_engine()
    engine.add(a_request("a", _PROMPT, max_tokens=3))
    engine.pausing.pause(PauseMode.KEEP)
    engine.pausing.pause(PauseMode.KEEP)
    engine.add(a_request("moved", [*_PROMPT, 9], num_generated=1, max_tokens=3))
    assert engine.pausing.num_held == 1
    engine.pausing.pause(PauseMode.WAIT)
    assert set(run_until_idle(engine)) == {"a", "moved"}
    engine.pausing.pause(PauseMode.KEEP)
    engine.add(a_request("late", [*_PROMPT, 9], num_generated=1, max_tokens=3))
    engine.pausing.pause(PauseMode.ABORT)
    assert [u.finish_reason for u in engine.step().updates] == [FinishReason.ABORT]
    engine.pausing.resume()
    engine.pausing.resume()
    assert_idle(engine)


@pytest.mark.parametrize("mode", _MODES)
def test_a_held_request_can_be_cancelled(mode: PauseMode) -> None:
    engine, _ = a_plain_engine()
    engine.pausing.pause(mode)
    engine.add(a_request("a", _PROMPT))
    assert not engine.is_idle
    assert engine.abort(RequestId("a"))
    assert not engine.abort(RequestId("a"))
    assert_idle(engine)


def test_held_requests_count_for_the_limit_of_the_queue() -> None:
    engine, _ = a_plain_engine()
    engine.pausing.pause(PauseMode.KEEP)
    for number in range(1024):
        engine.add(a_request(str(number), [1, 2]))
    with pytest.raises(Overloaded):
        engine.add(a_request("last", [1, 2]))


def test_no_prefetch_starts_while_paused() -> None:
    engine, _ = a_plain_engine()
    engine.pausing.pause(PauseMode.KEEP)
    engine.prefetch_kv(KvPrefetchRequest(RequestId("a"), None, 0, (), ()))
    assert [outcome.failure for outcome in engine.step().loads] == ["generation is paused"]
    assert_idle(engine)


def test_weights_do_not_change_while_the_engine_generates() -> None:
    engine, runner = _an_engine()
    engine.add(a_request("a", _PROMPT, max_tokens=9))
    for mode in (None, PauseMode.WAIT):
        if mode is not None:
            engine.pausing.pause(mode)
        with pytest.raises(Unavailable, match="paused"):
            _change(engine, runner)
    assert engine.weights == WeightVersion("", 0)


def test_a_request_continues_with_the_new_weights_and_the_tokens_that_it_has() -> None:
    engine, runner = _an_engine()
    engine.add(a_request("a", _PROMPT, max_tokens=9))
    before = [token.token_id for _ in range(3) for u in engine.step().updates for token in u.tokens]
    engine.pausing.pause(PauseMode.KEEP)
    assert _change(engine, runner) == 1
    assert engine.weights == WeightVersion("v1", 1)
    engine.add(a_request("same prompt", _PROMPT, max_tokens=2))
    engine.pausing.resume()
    after = run_until_idle(engine)
    expected = [*_PROMPT, *before]
    for token in after["a"]:
        assert token == _token(expected, 1)
        expected.append(token)
    assert len(before) + len(after["a"]) == 9
    assert after["same prompt"][0] == _token(_PROMPT, 1)
    assert_idle(engine)


def test_pages_of_old_weights_are_outdated_for_peers() -> None:
    engine, runner = _an_engine()
    engine.add(a_request("a", _PROMPT, max_tokens=9))
    engine.step()
    before = list(engine.allocator.pool.epochs)
    engine.pausing.pause(PauseMode.KEEP)
    _change(engine, runner)
    used = -(-len(_PROMPT) // 4)
    assert sum(a != b for a, b in zip(before, engine.allocator.pool.epochs, strict=True)) >= used


@dataclass
class _Case:
    """A run of an engine, with the weights of each token."""

    engine: Engine
    runner: _Runner
    prompts: dict[str, list[int]] = field(default_factory=dict)
    tokens: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """The tokens of each request, each with the number of its weights."""
    ended: dict[str, SequenceUpdate | None] = field(default_factory=dict)
    """Last update of each request; `None` if it was cancelled."""

    def step(self) -> None:
        for update in self.engine.step().updates:
            got = self.tokens[update.request_id]
            got.extend((token.token_id, self.engine.weights.number) for token in update.tokens)
            if update.finish_reason is not None or update.error is not None:
                assert update.request_id not in self.ended
                self.ended[update.request_id] = update

    def add(self, prompt: list[int], num_generated: int, max_tokens: int) -> None:
        name = str(len(self.prompts))
        self.prompts[name], self.tokens[name] = prompt, []
        self.engine.add(a_request(name, prompt, num_generated=num_generated, max_tokens=max_tokens + num_generated))


_PROMPTS = st.sampled_from([_PROMPT, _PROMPT[:9], [*_PROMPT, 3, 4], [40, 41], list(range(50, 70))])
_ACTIONS = st.one_of(
    st.tuples(st.just("add"), _PROMPTS, st.integers(0, 1), st.integers(1, 7)),
    st.tuples(st.just("step"), st.integers(1, 3)),
    st.tuples(st.just("pause"), st.sampled_from(_MODES)),
    st.tuples(st.just("resume")),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("weights")),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(_ACTIONS, max_size=40))
def test_no_request_is_lost_and_each_token_is_of_the_weights_it_names(actions: list[tuple[object, ...]]) -> None:
    case = _Case(*_an_engine())
    engine, was_aborted = case.engine, False
    for action in actions:
        match action:
            case ("add", list(prompt), int(generated), int(count)):
                case.add(prompt, generated, count)
            case ("step", int(count)):
                for _ in range(count):
                    case.step()
            case ("pause", PauseMode() as mode):
                was_aborted |= mode is PauseMode.ABORT
                engine.pausing.pause(mode)
            case ("resume",):
                engine.pausing.resume()
            case ("cancel", int(number)):
                if engine.abort(RequestId(str(number))):
                    case.ended[str(number)] = None
            case ("weights",):
                if engine.is_pause_settled:
                    _change(engine, case.runner)
        engine.check_integrity()
    engine.pausing.resume()
    for _ in range(400):
        case.step()
    assert set(case.ended) == set(case.prompts)
    for name, prompt in case.prompts.items():
        sequence, last = list(prompt), case.ended[name]
        for token, weights in case.tokens[name]:
            assert token == _token(sequence, weights)
            sequence.append(token)
        assert last is None or last.finish_reason is not None
        if last is not None and last.finish_reason is FinishReason.ABORT:
            assert was_aborted
    assert_idle(engine)


def test_a_later_change_has_a_higher_revision() -> None:
    first = PauseState().next(PauseMode.KEEP, "a", 12.0)
    assert (first.revision, first.mode, first.by, first.since) == (12000, PauseMode.KEEP, "a", 12.0)
    assert first.next(None, "b", 5.0).revision == 12001, "a clock that is behind does not undo a change"


def test_versions_are_runs_of_tokens() -> None:
    runs = with_version((), "v1", 0)
    assert with_version(runs, "v1", 3) == (("v1", 0),)
    assert with_version(runs, "", 3) == (("v1", 0),)
    assert with_version(runs, "v2", 3) == (("v1", 0), ("v2", 3))
