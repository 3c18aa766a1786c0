"""A runner, a loader and tiers that do their work at random times between a call and its answer.

Until a step's result is read it may not have run, and until a transport is quiet it may still write to its targets. At
any of these times, each of them writes the right content, or garbage where a write may only spoil its own result. A
page that is used or reused too early therefore changes tokens.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from harness.fakes.engines import ArithmeticRunner, attach
from harness.fakes.masks import FakeMask
from kvferry.core.ids import BlockId, RequestId
from kvferry.engine.engine import Engine
from kvferry.engine.schedule.step.sampling_plan import needs_host
from kvferry.engine.schedule.step.step import ScheduledSequence, StepPlan, StepResult
from kvferry.kv.interface.connector import LoadOutcome, PagesQuiet
from kvferry.kv.interface.tiering import ObjectKey, StoreDone, TierAnswer, TierSource

Page = list[int | None]
GARBAGE = -1


class QueuedRunner(ArithmeticRunner):
    """Runs steps in order, each at some time before its result is read, up to two at a time.

    With `samples_on_host`, as a CPU runner does, constrained sequences run ahead too: a step waits for masks that
    depend on the tokens of the step before.
    """

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        chance: random.Random,
        windows: Sequence[int | None] = (None,),
        *,
        samples_on_host: bool = False,
    ) -> None:
        super().__init__(num_blocks, block_tokens, windows)
        self._chance, self._samples_on_host = chance, samples_on_host
        self._queue: list[QueuedStep] = []
        self._last: dict[RequestId, int] = {}
        """Token that the last step sampled for each sequence; none for a sequence whose mask was late."""
        self._begun: frozenset[RequestId] = frozenset()
        self.num_ahead = self.num_masked_ahead = 0

    def begin(self, plan: StepPlan) -> "QueuedStep":
        frozen = [
            replace(
                s,
                token_ids=list(s.token_ids),
                block_ids=list(s.block_ids),
                further_ids=[list(ids) for ids in s.further_ids],
            )
            for s in plan.scheduled
        ]
        step = QueuedStep(self, replace(plan, scheduled=tuple(frozen)))
        self.num_ahead += any(map(is_ahead, frozen))
        self.num_masked_ahead += any(is_ahead(s) and s.mask is not None for s in frozen)
        self._queue.append(step)
        self._begun = frozenset(s.request_id for s in frozen if s.num_sampled)
        assert len(self._queue) <= 2
        self.run_some()
        return step

    def may_follow(self, plan: StepPlan) -> bool:
        needs = not self._samples_on_host and any(map(needs_host, plan.scheduled))
        return not needs and all(s.request_id in self._begun for s in plan.scheduled)

    def run_some(self) -> None:
        """Run queued steps with some probability, as a device does while the host is busy."""
        while self._queue and has_masks(self._queue[0].plan) and self._chance.random() < 0.3:
            self.run_first()

    def run_first(self) -> None:
        step = self._queue.pop(0)
        known = [
            replace(s, token_ids=[*s.token_ids, self._last.get(s.request_id, 0)]) if is_ahead(s) else s
            for s in step.plan.scheduled
        ]
        step.found = self.run(replace(step.plan, scheduled=tuple(known)))
        self._last = {name: output.tokens[-1].token_id for name, output in step.found.outputs.items() if output.tokens}

    def run_until(self, step: "QueuedStep") -> StepResult:
        while step.found is None:
            self.run_first()
        return step.found


class QueuedStep:
    """A launched step."""

    def __init__(self, runner: QueuedRunner, plan: StepPlan) -> None:
        self._runner, self.plan = runner, plan
        self.found: StepResult | None = None

    def result(self) -> StepResult:
        return self._runner.run_until(self)


def has_masks(plan: StepPlan) -> bool:
    """Return whether the tokens before each mask of a plan are known, or the mask was abandoned."""
    return all(not isinstance(s.mask, FakeMask) or s.mask.is_known.is_set() for s in plan.scheduled)


def is_ahead(s: ScheduledSequence) -> bool:
    """Return whether the sequence's last token was not known when the step was launched."""
    return s.num_computed == len(s.token_ids)


@dataclass
class _Load:
    job: int
    request_id: RequestId
    pages: list[Page]
    """Content that a load without failures writes to its targets."""
    targets: list[BlockId]
    num_done: int = 0
    has_ended: bool = False
    """Whether the outcome was reported; garbage may be written until the transport is quiet."""
    is_cancelled: bool = False


class DelayedLoads:
    """Loads that progress with each call of `work`, fail sometimes, and then take some time to be quiet."""

    def __init__(self, engine: Engine, runner: ArithmeticRunner, chance: random.Random, failing: float) -> None:
        self._engine, self._runner, self._chance, self._failing = engine, runner, chance, failing
        self._loads: list[_Load] = []

    def begin(self, job: int, request_id: RequestId, pages: list[Page], targets: Sequence[BlockId]) -> None:
        self._loads.append(_Load(job, request_id, pages, list(targets)))

    def cancel(self, request_id: RequestId) -> None:
        for load in self._loads:
            load.is_cancelled |= load.request_id == request_id

    @property
    def num_active(self) -> int:
        return len(self._loads)

    def work(self, *, counts_partly: bool) -> None:
        """Advance each load by a random amount.

        Args:
            counts_partly: whether the leading blocks of a failed load can be used.
        """
        for load in list(self._loads):
            self._advance(load, counts_partly=counts_partly)

    def _advance(self, load: _Load, *, counts_partly: bool) -> None:
        draw = self._chance.random
        if load.has_ended:
            if draw() < 0.4:
                self._loads.remove(load)
                self._engine.post(PagesQuiet(load.job))
            elif load.targets:
                self._runner.pages[self._chance.choice(load.targets)][:] = [GARBAGE] * self._runner.block_tokens
            return
        missing = load.num_done == len(load.pages)
        if load.num_done < len(load.targets) and not missing and not load.is_cancelled and draw() >= self._failing:
            self._runner.pages[load.targets[load.num_done]][:] = load.pages[load.num_done]
            load.num_done += 1
            return
        is_good = load.num_done == len(load.targets) and not load.is_cancelled
        usable = load.num_done if is_good or counts_partly else 0
        failure = None if is_good else "cancelled" if load.is_cancelled else "failed"
        self._engine.post(LoadOutcome(load.request_id, load.job, failure, usable, 0, 0.1))
        if is_good or usable:
            self._loads.remove(load)
            self._engine.post(PagesQuiet(load.job))
        load.has_ended = True


@dataclass(frozen=True)
class Offer:
    """Pages that another engine exports."""

    runner: ArithmeticRunner
    blocks: tuple[BlockId, ...]
    release: Callable[[], None]


class DelayedLoader(DelayedLoads):
    """Loads of another engine's pages. An offer must stay until the load that reads it has ended."""

    def __init__(self, engine: Engine, runner: ArithmeticRunner, chance: random.Random, failing: float) -> None:
        super().__init__(engine, runner, chance, failing)
        attach(engine, loader=self)

    def start(
        self, job: int, request_id: RequestId, source: object, first_block: int, targets: Sequence[BlockId]
    ) -> None:
        assert isinstance(source, Offer)
        # References to pages, whose contents are read when the load copies them.
        pages = [source.runner.pages[block] for block in source.blocks[first_block:]]
        self.begin(job, request_id, pages, targets)

    def is_reading(self, *request_ids: str) -> bool:
        return any(load.request_id in request_ids for load in self._loads)


class DelayedTiers:
    """A tier that answers, loads and stores with delays, and loses objects."""

    object_blocks = 2
    held_share = 0.5

    def __init__(self, engine: Engine, runner: ArithmeticRunner, chance: random.Random, failing: float) -> None:
        self._engine, self._runner, self._chance = engine, runner, chance
        self._loads = DelayedLoads(engine, runner, chance, failing)
        self._kept: dict[bytes, list[Page]] = {}
        self._asked: list[tuple[RequestId, tuple[ObjectKey, ...]]] = []
        self._stores: list[tuple[int, ObjectKey, tuple[BlockId, ...]]] = []
        self.num_loads = 0
        attach(engine, tiers=self)

    def ask(self, request_id: RequestId, keys: Sequence[ObjectKey]) -> TierAnswer | None:
        if self._chance.random() < 0.5:
            return self._answer(request_id, keys)
        self._asked.append((request_id, tuple(keys)))
        return None

    def _answer(self, request_id: RequestId, keys: Sequence[ObjectKey]) -> TierAnswer:
        run = next((i for i, key in enumerate(keys) if key.name not in self._kept), len(keys))
        return TierAnswer(request_id, ("dram",) * run)

    def prefetch(self, request_id: RequestId, source: TierSource) -> None:
        pass

    def accepts(self, key: ObjectKey) -> bool:
        return key.name not in self._kept

    def store(self, job: int, key: ObjectKey, pages: Sequence[BlockId]) -> None:
        self._stores.append((job, key, tuple(pages)))

    def start(
        self, job: int, request_id: RequestId, source: object, first_block: int, targets: Sequence[BlockId]
    ) -> None:
        assert isinstance(source, TierSource)
        self.num_loads += 1
        pages: list[Page] = []
        for key in source.keys:
            if key.name not in self._kept:
                break
            pages += self._kept[key.name]
        size = self.object_blocks * len(self._engine.allocator.windows)
        self._loads.begin(job, request_id, pages[first_block - source.first_object * size :], targets)

    def cancel(self, request_id: RequestId) -> None:
        self._loads.cancel(request_id)
        self._asked = [request for request in self._asked if request[0] != request_id]

    @property
    def num_active(self) -> int:
        return self._loads.num_active + len(self._stores)

    def close(self) -> None:
        """Do nothing: there are no threads."""

    def work(self) -> None:
        """Advance loads, stores and answers by a random amount."""
        self._loads.work(counts_partly=True)
        for request in list(self._asked):
            if self._chance.random() < 0.4:
                self._asked.remove(request)
                self._engine.post(self._answer(*request))
        for store in list(self._stores):
            if self._chance.random() < 0.2:
                self._stores.remove(store)
                job, key, blocks = store
                self._kept[key.name] = [list(self._runner.pages[block]) for block in blocks]
                self._engine.post(StoreDone(job))
        if self._kept and self._chance.random() < 0.02:
            del self._kept[self._chance.choice(list(self._kept))]
