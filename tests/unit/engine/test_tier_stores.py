"""Stores of an engine to its tiers: a page keeps the content of its name until the store has ended."""

from collections.abc import Sequence

from harness.fakes.engines import ArithmeticRunner, a_request, an_engine, attach, next_token
from harness.idle import assert_idle

from kvferry.core.hashing import BlockNamer
from kvferry.core.ids import BlockHash, BlockId, RequestId
from kvferry.engine.schedule.step.kv_progress import RemoteKv
from kvferry.kv.interface.connector import LoadOutcome, PagesQuiet
from kvferry.kv.interface.tiering import ObjectKey, StoreDone, TierAnswer, TierSource


class HeldTiers:
    """Tiers that hold no object, accept every store, and end no store by themselves."""

    object_blocks = 2
    held_share = 1.0
    num_active = 0

    def __init__(self) -> None:
        self.given: list[tuple[int, ObjectKey, tuple[BlockId, ...]]] = []

    def ask(self, request_id: RequestId, keys: Sequence[ObjectKey]) -> TierAnswer | None:
        return TierAnswer(request_id, ())

    def prefetch(self, request_id: RequestId, source: TierSource) -> None:
        raise AssertionError("there is nothing to prefetch")

    def accepts(self, key: ObjectKey) -> bool:
        return True

    def store(self, job: int, key: ObjectKey, pages: Sequence[BlockId]) -> None:
        self.given.append((job, key, tuple(pages)))

    def start(
        self, job: int, request_id: RequestId, source: object, first_block: int, targets: Sequence[BlockId]
    ) -> None:
        raise AssertionError("there is nothing to load")

    def cancel(self, request_id: RequestId) -> None:
        pass

    def close(self) -> None:
        pass


class ManualLoader:
    """A loader whose loads end on request of the test."""

    num_active = 0

    def __init__(self) -> None:
        self.started: list[tuple[int, RequestId, tuple[BlockId, ...]]] = []

    def start(
        self, job: int, request_id: RequestId, source: object, first_block: int, targets: Sequence[BlockId]
    ) -> None:
        self.started.append((job, request_id, tuple(targets)))

    def cancel(self, request_id: RequestId) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_hand_off_that_is_preempted_in_the_step_it_arrives_in_is_stored_as_it_came() -> None:
    engine, runner = an_engine(num_blocks=18)
    tiers, loader = HeldTiers(), ManualLoader()
    attach(engine, loader=loader)
    attach(engine, tiers=tiers)
    prompts = {f"old{i}": list(range(30 + 16 * i, 46 + 16 * i)) for i in range(3)}
    for name, prompt in prompts.items():
        engine.add(a_request(name, prompt))
    arriving = list(range(3, 24))
    tokens = [*arriving, next_token(arriving)]
    engine.add(a_request("new", tokens, num_generated=1, remote=RemoteKv(len(arriving), object())))
    engine.step()  # each old sequence has four pages and needs a fifth; the new one has the other six
    assert engine.allocator.pool.num_free == 0
    ((job, request_id, targets),) = loader.started
    for position, token in enumerate(arriving):
        runner.pages[targets[position // 4]][position % 4] = token
    engine.post(LoadOutcome(request_id, job, None, len(targets), 0, 0.1))
    engine.post(PagesQuiet(job))
    engine.step()
    assert engine.scheduler.num_preemptions > 0
    namer = engine.namer("")
    assert namer.chain(arriving)[3] in {key.name for _, key, _ in tiers.given}
    looked = 0
    while engine.has_work or looked < len(tiers.given):
        looked = look(engine.namer(""), runner, tiers, looked, [*prompts.values(), tokens])
        for done, _, _ in tiers.given[:looked]:
            engine.post(StoreDone(done))
        engine.step()
        engine.check_integrity()
    assert_idle(engine)


def look(
    namer: BlockNamer, runner: ArithmeticRunner, tiers: HeldTiers, start: int, beginnings: Sequence[Sequence[int]]
) -> int:
    """Check that the pages given to tiers, from `start` on, have the tokens of their names; return the number given."""
    known: dict[BlockHash, list[int]] = {}
    for tokens in beginnings:
        whole = list(tokens)
        while len(whole) < len(tokens) + 8:
            whole.append(next_token(whole))
        names = namer.chain(whole)
        known |= {names[end - 1]: whole[(end - 2) * 4 : end * 4] for end in range(2, len(names) + 1, 2)}
    for _, key, pages in tiers.given[start:]:
        assert [t for page in pages for t in runner.pages[page]] == known[key.name]
    return len(tiers.given)
