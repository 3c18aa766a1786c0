"""Engines without a model: the real scheduler and block pool with a runner that derives tokens by arithmetic.

They are used in tests of scheduling decisions; end-to-end tests use the real runner.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from harness.fakes.small_engine import engine_for
from kvferry.core.clock import Clock
from kvferry.core.ids import BlockId, RequestId
from kvferry.core.philox import uniform
from kvferry.core.sampling import SampledToken, SamplingParams, ScoredToken
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.engine import Engine
from kvferry.engine.schedule.loads.kv_loads import KvLoads
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.speculation.speculation import Speculation
from kvferry.engine.schedule.step.draft_tree import moves, path_rows
from kvferry.engine.schedule.step.kv_progress import RemoteKv
from kvferry.engine.schedule.step.step import Sampled, ScheduledSequence, StepPlan, StepResult, rows_of
from kvferry.engine.schedule.step.token_mask import unpacked
from kvferry.kv.interface.connector import KvLoader
from kvferry.kv.interface.tiering import KvTiers

VOCAB = 97
EOS = 96
FIRST_STATE = 7
POISON = -2
"""Content of a slot of a rejected draft token."""


def next_token(tokens: list[int]) -> int:
    """Return the token that follows `tokens`: a checksum of all of them, but never the end-of-sequence token."""
    state = FIRST_STATE
    for token in tokens:
        state = state_after(state, token)
    return state % EOS


def drawn_token(tokens: list[int], sampling: SamplingParams, sample_index: int) -> int:
    """Return the token that a request draws after `tokens`: `next_token`, or, if the request samples, another token
    with probability 0.3, depending on its seed and the position."""
    token = next_token(tokens)
    if sampling.is_greedy:
        return token
    assert sampling.seed is not None
    u = uniform(sampling.seed, sample_index, len(tokens))
    return token if u < 0.7 else (token + int(u * 1000)) % EOS


def state_after(state: int, token: int) -> int:
    """Return the checksum of the tokens of `state` and one more; modulo `EOS`, it is the token that follows them."""
    return (state * 31 + token + 1) % 1_000_003


def mark(group: int, position: int, token: int) -> int:
    """Return the content of a slot of a further group of layers, which no other slot and no token has."""
    return VOCAB + ((group * 4096 + position) * VOCAB) + token


def written_slots(item: ScheduledSequence, block_tokens: int) -> Iterator[tuple[int, int, BlockId, int]]:
    """Yield the group, position, page and slot of the page of each KV slot that a step writes for a sequence."""
    for group, ids in enumerate((item.block_ids, *item.further_ids)):
        for position in range(item.num_computed, item.num_computed + item.num_scheduled):
            block, slot = divmod(position, block_tokens)
            assert ids[block] >= 0, f"request {item.request_id} writes to a page that was released"
            yield group, position, ids[block], slot


def places_of(item: ScheduledSequence, row: int) -> list[int]:
    """Return the places in the sequence, in order of position, of the tokens to which a scheduled row attends."""
    place = item.num_computed + row
    root = len(item.token_ids) - len(item.parents) - 1
    if not item.parents or place <= root:
        return list(range(place + 1))
    return [*range(root + 1), *(root + above for above in path_rows(item.parents, place - root))]


class ArithmeticRunner:
    """A runner that stores each computed token in its KV slot and derives the next token from the slots that it reads.

    A wrong page, a page reused too early or a position that was not computed therefore changes the tokens. Tokens are
    derived from the first group of layers, and in the others everything within the window is checked. The slots of
    rejected draft tokens are poisoned after the step, so that they must not be read before they are computed again.
    """

    def __init__(self, num_blocks: int, block_tokens: int, windows: Sequence[int | None] = (None,)) -> None:
        self.block_tokens = block_tokens
        self.further_windows = tuple(windows[1:])
        self.pages: list[list[int | None]] = [[None] * block_tokens for _ in range(num_blocks)]
        self.steps: list[StepPlan] = []
        self.has_head = False
        """Whether results have hidden states of all rows: position, token, and checksum of the KV up to it."""
        self.num_poisoned = 0
        """Number of slots of rejected draft tokens."""

    def run(self, plan: StepPlan) -> StepResult:
        self.steps.append(plan)
        for item in plan.scheduled:  # all writes precede the reads, as in a layer
            assert len(item.further_ids) == len(self.further_windows)
            for group, place, page, slot in written_slots(item, self.block_tokens):
                token = item.token_ids[place]
                position = len(places_of(item, place - item.num_computed)) - 1 if item.parents else place
                self.pages[page][slot] = mark(group - 1, position, token) if group else token
        for item in plan.scheduled:
            self._check_further(item)
        sampled = [
            self._sample(row, places_of(item, item.num_scheduled - item.num_sampled + index))
            for item in plan.scheduled
            if item.num_sampled
            for index, row in enumerate(rows_of(item))
        ]
        scores = {s.request_id: tuple(self._score(s, p) for p in s.scored_positions) for s in plan.scheduled}
        found = {name: made for name, made in scores.items() if made}
        pooled = {s.request_id: self._pool(s) for s in plan.scheduled if s.pooled_positions}
        hidden = np.concatenate([self._hidden(s) for s in plan.scheduled]) if self.has_head else None
        result = replace(StepResult.of(plan.scheduled, sampled, found), pooled=pooled, hidden=hidden)
        for item in plan.scheduled:
            if item.num_drafts:
                self._move(item, result)
                self._poison(item, result)
        return result

    def _move(self, item: ScheduledSequence, result: StepResult) -> None:
        """Move the slots of the accepted path of a tree behind its root."""
        output, root = result.outputs.get(item.request_id), len(item.token_ids) - len(item.parents) - 1
        for source, target in moves(output.path) if output is not None else ():
            for ids in (item.block_ids, *item.further_ids):
                (block, slot), (other, place) = (divmod(root + row, self.block_tokens) for row in (source, target))
                self.pages[ids[other]][place] = self.pages[ids[block]][slot]

    def _poison(self, item: ScheduledSequence, result: StepResult) -> None:
        """Overwrite the slots of a sequence's rejected draft tokens."""
        output = result.outputs.get(item.request_id)
        accepted = item.num_scheduled - item.num_sampled if output is None else output.accepted
        for group, position, page, slot in written_slots(item, self.block_tokens):
            if position >= item.num_computed + accepted:
                self.pages[page][slot] = POISON
                self.num_poisoned += not group

    def _check_further(self, item: ScheduledSequence) -> None:
        """Check all slots within the windows of the rows: those of the first row, and the rows themselves."""
        for group, (ids, window) in enumerate(zip(item.further_ids, self.further_windows, strict=True)):
            for row in range(item.num_scheduled):
                places = places_of(item, row)
                first = 0 if window is None else max(0, len(places) - window)
                for position, place in enumerate(places[first:], first):
                    block, slot = divmod(place, self.block_tokens)
                    assert ids[block] >= 0, f"request {item.request_id} reads position {position} after its release"
                    assert self.pages[ids[block]][slot] == mark(group, position, item.token_ids[place])

    def _hidden(self, item: ScheduledSequence) -> npt.NDArray[np.float32]:
        rows = list[tuple[int, int, int]]()
        for row in range(item.num_scheduled):
            state, token, places = FIRST_STATE, None, places_of(item, row)
            for place in places:
                token = self.pages[item.block_ids[place // self.block_tokens]][place % self.block_tokens]
                assert token is not None
                state = state_after(state, token)
            assert token is not None
            rows.append((len(places) - 1, token, state))
        return np.array(rows, np.float32)

    def _sample(self, row: ScheduledSequence, places: list[int]) -> Sampled:
        """Sample a row of a sequence from the KV that it reads."""
        read = [self.pages[row.block_ids[p // self.block_tokens]][p % self.block_tokens] for p in places]
        assert len(read) == len(row.token_ids)
        assert None not in read, f"request {row.request_id} read a slot that was not computed"
        assert POISON not in read, f"request {row.request_id} read the KV of a rejected draft token"
        token = drawn_token([t for t in read if t is not None], row.sampling, row.sample_index)
        if row.mask is None:
            return SampledToken(token)
        allowed = row.mask.wait()
        return None if allowed is None else SampledToken(next_allowed(token, unpacked(allowed, VOCAB)))

    def _pool(self, item: ScheduledSequence) -> npt.NDArray[np.float64]:
        """Sum [token, position] over the pooled rows, as the KV has them."""
        rows = [
            (self.pages[item.block_ids[p // self.block_tokens]][p % self.block_tokens], p)
            for p in item.pooled_positions
        ]
        total: npt.NDArray[np.float64] = np.array(rows, dtype=np.float64).sum(axis=0)
        return total

    def _score(self, item: ScheduledSequence, position: int) -> ScoredToken:
        """Score the token after a position by the KV up to it, so that a score from a wrong page differs."""
        read = [self.pages[item.block_ids[p // self.block_tokens]][p % self.block_tokens] for p in range(position + 1)]
        assert None not in read, f"request {item.request_id} scored a row after a slot that was not computed"
        logprob = -float(next_token([t for t in read if t is not None]))
        return ScoredToken(item.token_ids[position + 1], logprob, rank=position + 1)


class WindowedRunner:
    """A runner that writes each row's group, position and token to its slot in every group, and fails if a row would
    read anything else within its window. Tokens are those of `ArithmeticRunner`."""

    def __init__(self, num_blocks: int, block_tokens: int, windows: Sequence[int | None]) -> None:
        self.block_tokens, self.windows = block_tokens, tuple(windows)
        self.pages: list[list[tuple[int, int, int] | None]] = [[None] * block_tokens for _ in range(num_blocks)]
        self.steps: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.steps.append(plan)
        for item in plan.scheduled:  # all writes precede the reads, as in a layer
            for group, position, page, slot in written_slots(item, self.block_tokens):
                self.pages[page][slot] = (group, position, item.token_ids[position])
        for item in plan.scheduled:
            self._check_reads(item)
        rows = [row for item in plan.scheduled if item.num_sampled for row in rows_of(item)]
        return StepResult.of(plan.scheduled, [SampledToken(next_token(list(row.token_ids))) for row in rows])

    def _check_reads(self, item: ScheduledSequence) -> None:
        """Check all slots that the item's rows read: those of the first row, and the rows themselves."""
        groups = (item.block_ids, *item.further_ids)
        assert len(groups) == len(self.windows)
        end = item.num_computed + item.num_scheduled
        for group, (ids, window) in enumerate(zip(groups, self.windows, strict=True)):
            first = 0 if window is None else max(0, item.num_computed + 1 - window)
            for position in range(first, end):
                page = ids[position // self.block_tokens]
                assert page >= 0, f"request {item.request_id} reads position {position} after its release"
                found = self.pages[page][position % self.block_tokens]
                assert found == (group, position, item.token_ids[position])


def next_allowed(token: int, allowed: npt.NDArray[np.bool_]) -> int:
    """Return the first allowed token from `token` on, in cyclic order."""
    return (token + int(np.roll(allowed, -token).argmax())) % len(allowed)


def small_limits(*, scheduling: str = "fcfs", class_weights: str = "", **changes: int) -> SchedulerLimits:
    """Return scheduler limits of 64 tokens per step and 8 sequences, updated by `changes`."""
    base = {"token_budget": 64, "max_chunk_tokens": 64, "max_num_seqs": 8}
    return SchedulerLimits(**{**base, **changes}, scheduling=scheduling, class_weights=class_weights, reserve_share=0.0)


def shares(runner: ArithmeticRunner) -> list[list[tuple[str, int]]]:
    """Return (request id, number of tokens) of each scheduled sequence, by step."""
    return [[(s.request_id, s.num_scheduled) for s in plan.scheduled] for plan in runner.steps]


def an_engine(
    *,
    num_blocks: int = 64,
    block_tokens: int = 4,
    max_model_tokens: int = 128,
    limits: SchedulerLimits | None = None,
    speculation: Speculation | None = None,
    clock: Clock | None = None,
    windows: tuple[int | None, ...] = (None,),
    pin_share: float = 0.25,
    retention_share: float = 0.25,
) -> tuple[Engine, ArithmeticRunner]:
    """Create a small engine and its runner."""
    runner = ArithmeticRunner(num_blocks, block_tokens, windows)
    engine = engine_for(
        runner,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        max_model_tokens=max_model_tokens,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        limits=limits or small_limits(),
        speculation=speculation,
        clock=clock,
        windows=windows,
        pin_share=pin_share,
        retention_share=retention_share,
    )
    return engine, runner


def a_windowed_engine(
    windows: Sequence[int | None],
    *,
    num_blocks: int = 64,
    block_tokens: int = 4,
    max_model_tokens: int = 256,
    limits: SchedulerLimits | None = None,
    speculation: Speculation | None = None,
) -> tuple[Engine, WindowedRunner]:
    """Create a small engine whose groups of layers have these windows, and its runner."""
    runner = WindowedRunner(num_blocks, block_tokens, windows)
    engine = engine_for(
        runner,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        max_model_tokens=max_model_tokens,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        limits=limits or small_limits(),
        windows=tuple(windows),
        speculation=speculation,
    )
    return engine, runner


def attach(engine: Engine, *, loader: KvLoader | None = None, tiers: KvTiers | None = None) -> None:
    """Set the loader and the tiers of an engine under test, which may refer to the engine themselves."""
    own = engine._loads
    engine._loads = KvLoads(
        engine.scheduler,
        engine.allocator,
        loader=loader or own._loader,
        tiers=tiers or (None if own._tiers is None else own._tiers.tiers),
        prices=engine._prices,
        block_bytes=own._block_bytes,
    )


def a_request(
    name: str,
    tokens: list[int],
    *,
    max_tokens: int = 4,
    exports: bool = False,
    num_generated: int = 0,
    remote: RemoteKv | None = None,
    scope: str = "",
    priority: int = 0,
    prompt_logprobs: int | None = None,
    retain_seconds: float = 0.0,
) -> EngineRequest:
    """Create a request with greedy sampling."""
    return EngineRequest(
        request_id=RequestId(name),
        token_ids=tokens,
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs),
        num_generated=num_generated,
        priority=priority,
        exports=exports,
        remote=remote,
        scope=scope,
        retain_seconds=retain_seconds,
    )


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    """Return the `count` tokens that `ArithmeticRunner` generates after `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def run_until_idle(engine: Engine, *, max_steps: int = 10_000) -> dict[str, list[int]]:
    """Step until the engine is idle, checking its invariants after each step; return the tokens by request."""
    tokens: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return tokens
        for update in engine.step().updates:
            tokens.setdefault(update.request_id, []).extend(t.token_id for t in update.tokens)
        engine.check_integrity()
    raise AssertionError(f"the engine is not idle after {max_steps} steps: {engine.load()}")
