"""KV prefetches in the engine: loads of blocks for later requests, and their outcomes."""

from collections.abc import Sequence

import pytest
from harness.fakes.engines import VOCAB, ArithmeticRunner, a_request, an_engine, attach, expected_tokens, run_until_idle
from harness.idle import assert_idle

from kvferry.core.ids import BlockId, RequestId
from kvferry.engine.engine import Engine
from kvferry.engine.schedule.loads.kv_prefetch import KvPrefetchRequest
from kvferry.kv.interface.connector import LoadOutcome, PagesQuiet

PROMPT = [(3 * i + 1) % (VOCAB - 1) for i in range(18)]  # four full blocks of four tokens, and two tokens


class Loader:
    """A loader that records the loads; `land` copies tokens into the pages as a transport would."""

    def __init__(self, runner: ArithmeticRunner) -> None:
        self.runner = runner
        self.started: list[tuple[int, RequestId, tuple[BlockId, ...]]] = []
        self.cancelled: list[RequestId] = []

    def start(
        self, job: int, request_id: RequestId, source: object, first_block: int, targets: Sequence[BlockId]
    ) -> None:
        assert first_block == 0
        self.started.append((job, request_id, tuple(targets)))

    def cancel(self, request_id: RequestId) -> None:
        self.cancelled.append(request_id)

    @property
    def num_active(self) -> int:
        return len(self.started)

    def land(self, first_block: int) -> LoadOutcome:
        job, request_id, targets = self.started[-1]
        for i, page in enumerate(targets, first_block):
            self.runner.pages[page] = list(PROMPT[4 * i : 4 * i + 4])
        return LoadOutcome(request_id, job, None, len(targets), 0, 0.01)


@pytest.fixture
def engine_and_loader() -> tuple[Engine, Loader]:
    engine, runner = an_engine(num_blocks=16)
    loader = Loader(runner)
    attach(engine, loader=loader)
    return engine, loader


def ahead(engine: Engine, first: int, end: int, name: str = "ahead") -> KvPrefetchRequest:
    names = engine.namer("").chain(PROMPT)
    return KvPrefetchRequest(RequestId(name), "source", first, tuple(names[:end]), tuple(PROMPT[: 4 * end]))


def test_blocks_fetched_ahead_are_a_local_hit(engine_and_loader: tuple[Engine, Loader]) -> None:
    engine, loader = engine_and_loader
    engine.prefetch_kv(ahead(engine, 0, 2))
    engine.check_integrity()
    assert engine.load().transfers == 1
    assert not engine.is_idle
    engine.post(loader.land(0))
    assert [o.failure for o in engine.step().loads] == [None]
    engine.prefetch_kv(ahead(engine, 2, 4, "more"))
    engine.post(loader.land(2))
    engine.post(PagesQuiet(loader.started[0][0]))
    engine.post(PagesQuiet(loader.started[1][0]))
    engine.step()
    assert_idle(engine)
    engine.add(a_request("r", PROMPT))
    assert run_until_idle(engine)["r"] == expected_tokens(PROMPT, 4)
    assert loader.runner.steps[0].scheduled[0].num_computed == 16


def test_a_failed_prefetch_lists_no_block_and_its_pages_stay_in_quarantine_until_quiet(
    engine_and_loader: tuple[Engine, Loader],
) -> None:
    engine, loader = engine_and_loader
    engine.prefetch_kv(ahead(engine, 0, 3))
    job, request_id, targets = loader.started[0]
    engine.post(LoadOutcome(request_id, job, "stalled", 0, 0, 1.0))
    engine.step()
    engine.check_integrity()
    pool = engine.allocator.pool
    assert all(pool.is_quarantined(b) for b in targets)
    assert engine.load().transfers == 1
    engine.post(PagesQuiet(job))
    engine.step()
    assert_idle(engine)
    assert len(engine.allocator.index) == 0


def test_a_prefetch_takes_no_page_below_the_reserve(engine_and_loader: tuple[Engine, Loader]) -> None:
    engine, loader = engine_and_loader
    held = engine.allocator.pool.allocate(10)
    assert held is not None
    engine.prefetch_kv(ahead(engine, 0, 3))  # 3 of 16 pages would stay free
    assert loader.started == []
    assert "too few free pages" in str(engine.step().loads[0].failure)
    engine.allocator.pool.release(held)
    assert_idle(engine)


def test_cached_blocks_are_not_fetched(engine_and_loader: tuple[Engine, Loader]) -> None:
    engine, loader = engine_and_loader
    engine.add(a_request("r", PROMPT, max_tokens=1))
    run_until_idle(engine)
    engine.prefetch_kv(ahead(engine, 0, 2))
    assert loader.started == []
    engine.step()
    assert_idle(engine)


def test_without_a_loader_there_is_no_prefetch() -> None:
    engine, _ = an_engine()
    engine.prefetch_kv(ahead(engine, 0, 2))
    assert engine.step().loads[0].failure
    assert_idle(engine)


def test_an_exporting_prompt_reports_its_blocks_chunk_by_chunk() -> None:
    engine, runner = an_engine(num_blocks=16)
    engine.scheduler.limits = type(engine.scheduler.limits)(
        token_budget=8, max_chunk_tokens=8, max_num_seqs=4, reserve_share=0.0
    )
    engine.add(a_request("r", PROMPT, exports=True))
    progress, export = [], None
    for _ in range(3):
        output = engine.step()
        progress += output.progress
        export = output.exports.get(RequestId("r"), export)
    assert [len(p.blocks) for p in progress] == [2, 2]
    assert [n for p in progress for n in p.names] == engine.namer("").chain(PROMPT)
    pool = engine.allocator.pool
    assert all(pool.epochs[b] == e for p in progress for b, e in zip(p.blocks, p.epochs, strict=True))
    assert export is not None
    engine.release_export(export)
    assert_idle(engine)
    assert runner.steps


def test_a_sequence_that_keeps_its_blocks_reports_them() -> None:
    engine, _ = an_engine(num_blocks=16)
    request = a_request("r", PROMPT, max_tokens=5)
    engine.add(type(request)(**{f: getattr(request, f) for f in request.__slots__} | {"keeps": True}))
    updates = []
    while engine.has_work:
        updates += engine.step().updates
    kept = updates[-1].kept
    assert kept is not None
    assert (kept.num_tokens, len(kept.blocks)) == (20, 5), (
        "KV of 18 prompt tokens and 4 of 5 sampled ones: the KV of the last token is not computed"
    )
    assert_idle(engine)
    pool = engine.allocator.pool
    assert [pool.epochs[b] for b in kept.blocks] == list(kept.epochs), (
        "the blocks are free and their content is unchanged"
    )
    pool.release(pool.allocate(16) or [])
    assert all(pool.epochs[b] != e for b, e in zip(kept.blocks, kept.epochs, strict=True))


def test_a_sequence_shorter_than_a_block_keeps_no_block() -> None:
    engine, _ = an_engine(num_blocks=16)
    request = a_request("r", [1], max_tokens=1)
    engine.add(type(request)(**{f: getattr(request, f) for f in request.__slots__} | {"keeps": True}))
    assert engine.step().updates[-1].kept is None
    assert_idle(engine)
