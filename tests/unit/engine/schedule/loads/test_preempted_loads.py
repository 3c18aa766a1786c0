"""A preempted sequence loads its blocks from tiers if that is cheaper, and waits no longer than computing would
take."""

from collections.abc import Sequence

import pytest
from harness.engines.account_book import AccountBook
from harness.fakes.engines import ArithmeticRunner, a_request, an_engine, attach, expected_tokens, small_limits
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.ids import BlockId, RequestId
from kvferry.core.inference.pooling import Pooling, PoolingParams
from kvferry.engine.engine import Engine
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.kv.interface.connector import LoadOutcome, PagesQuiet
from kvferry.kv.interface.tiering import ObjectKey, TierAnswer, TierSource
from kvferry.kv.pricing.price import LoadPolicy, PriceBook

OLD, YOUNG = list(range(20)), list(range(40, 60))
OLD_TOKENS, YOUNG_TOKENS = 28, 8


class DictTiers:
    """Tiers that hold "KV" of the arithmetic runner by name, and answer and load at once or on request of the test."""

    object_blocks = 2
    held_share = 1.0
    num_active = 0

    def __init__(self, engine: Engine, runner: ArithmeticRunner) -> None:
        self.engine, self.runner = engine, runner
        self.kept: dict[bytes, list[list[int | None]]] = {}
        self.is_late = False
        """If true, `ask` returns no answer; the test sends it with `answer`."""
        self.fails = False
        self.lookups: list[tuple[RequestId, list[ObjectKey]]] = []
        self.started: list[tuple[RequestId, TierSource, int, int]] = []
        attach(engine, tiers=self)

    def ask(self, request_id: RequestId, keys: Sequence[ObjectKey]) -> TierAnswer | None:
        self.lookups.append((request_id, list(keys)))
        return None if self.is_late else self._answer(request_id, keys)

    def _answer(self, request_id: RequestId, keys: Sequence[ObjectKey]) -> TierAnswer:
        run = next((i for i, key in enumerate(keys) if key.name not in self.kept), len(keys))
        return TierAnswer(request_id, ("dram",) * run)

    def answer(self) -> None:
        self.engine.post(self._answer(*self.lookups[-1]))

    def prefetch(self, request_id: RequestId, source: TierSource) -> None:
        pass

    def accepts(self, key: ObjectKey) -> bool:
        return key.name not in self.kept

    def store(self, job: int, key: ObjectKey, pages: Sequence[BlockId]) -> None:
        self.kept[key.name] = [list(self.runner.pages[b]) for b in pages]
        self.engine._loads._tiers.stored(job)  # type: ignore[union-attr]

    def start(
        self, job: int, request_id: RequestId, source: object, first_block: int, targets: Sequence[BlockId]
    ) -> None:
        assert isinstance(source, TierSource)
        self.started.append((request_id, source, first_block, len(targets)))
        blocks = [page for key in source.keys for page in self.kept[key.name]]
        wanted = blocks[first_block - source.first_object * self.object_blocks :]
        for target, page in zip(targets, wanted, strict=True):
            self.runner.pages[target] = list(page)
        failure = "slow" if self.fails else None
        self.engine.post(LoadOutcome(request_id, job, failure, 0 if self.fails else len(targets), 0, 0.001))
        self.engine.post(PagesQuiet(job))

    def cancel(self, request_id: RequestId) -> None:
        pass

    def close(self) -> None:
        pass


def a_case(policy: LoadPolicy = LoadPolicy.ALWAYS) -> tuple[Engine, ArithmeticRunner, DictTiers]:
    """Return an engine of twelve pages, its runner and tiers, with two sequences; the older one grows until it takes
    all pages.
    """
    engine, runner = an_engine(num_blocks=12, limits=small_limits())
    engine._prices = PriceBook(policy)
    tiers = DictTiers(engine, runner)
    engine.add(a_request("old", OLD, max_tokens=OLD_TOKENS))
    engine.add(a_request("young", YOUNG, max_tokens=YOUNG_TOKENS))
    return engine, runner, tiers


def until_preempted(engine: Engine, tokens: dict[str, list[int]]) -> None:
    while not engine.scheduler.num_preemptions:
        step(engine, tokens)


def sources(engine: Engine, name: str, prompt: list[int]) -> tuple[int, int, int]:
    """Run one request; return its numbers of cached, loaded and written tokens."""
    engine.add(a_request(name, prompt, max_tokens=1))
    while True:
        for update in engine.step().updates:
            if update.request_id == name:
                return update.num_cached, update.num_loaded, update.num_written


def step(engine: Engine, tokens: dict[str, list[int]]) -> None:
    for update in engine.step().updates:
        tokens.setdefault(update.request_id, []).extend(t.token_id for t in update.tokens)
    engine.check_integrity()


def finish(engine: Engine, tokens: dict[str, list[int]]) -> None:
    for _ in range(1000):
        if not engine.has_work and engine.is_idle:
            break
        step(engine, tokens)
    assert engine.is_idle
    assert tokens == {"old": expected_tokens(OLD, OLD_TOKENS), "young": expected_tokens(YOUNG, YOUNG_TOKENS)}


def recomputed(runner: ArithmeticRunner) -> int:
    """Return the number of tokens of the young sequence that were computed more than once."""
    spans = [s for plan in runner.steps for s in plan.scheduled if s.request_id == "young"]
    return sum(s.num_scheduled for s in spans) - (len(YOUNG) + YOUNG_TOKENS - 1)


def test_a_preempted_sequence_loads_the_full_objects_of_prompt_and_answer() -> None:
    engine, runner, tiers = a_case()
    tokens: dict[str, list[int]] = {}
    until_preempted(engine, tokens)
    lost = len(YOUNG) + len(tokens["young"])
    tiers.lookups.clear()
    finish(engine, tokens)
    assert engine.scheduler.num_preemptions == 1
    assert lost > 24, "the objects include output tokens"
    assert [(name, first, count) for name, _, first, count in tiers.started] == [("young", 0, 6)]
    assert recomputed(runner) == lost - 1 - 24


def test_loaded_tokens_are_counted_apart_from_cached_and_computed_ones() -> None:
    engine, runner = an_engine(num_blocks=12, limits=small_limits())
    engine._prices = PriceBook(LoadPolicy.ALWAYS)
    DictTiers(engine, runner)
    size = engine.scheduler.allocator.block_tokens
    assert sources(engine, "cold", YOUNG) == (0, 0, len(YOUNG) // size * size)
    cached, loaded, written = sources(engine, "again", YOUNG)
    assert (loaded, cached + written) == (0, len(YOUNG) // size * size)
    assert cached > 0
    engine.reset_prefix_cache()
    cached, loaded, written = sources(engine, "loaded", YOUNG)
    assert (cached, loaded) == (0, 2 * size * ((len(YOUNG) - 1) // (2 * size))), "whole objects of two blocks"
    assert loaded + written == len(YOUNG) // size * size


def test_tokens_that_the_request_itself_computed_do_not_count_as_loaded() -> None:
    engine, _, tiers = a_case()
    found = {}
    while engine.has_work or not engine.is_idle:
        for update in engine.step().updates:
            found[update.request_id] = (update.num_cached, update.num_loaded)
    assert [name for name, *_ in tiers.started] == ["young"], "it is preempted, and loads what it had computed"
    assert found[RequestId("young")] == (0, 0)


def test_blocks_that_are_still_cached_are_not_loaded() -> None:
    engine, runner, tiers = a_case()
    tokens: dict[str, list[int]] = {}
    until_preempted(engine, tokens)
    engine.abort(RequestId("old"))
    tokens["old"] = expected_tokens(OLD, OLD_TOKENS)
    finish(engine, tokens)
    assert sum(count for _, _, _, count in tiers.started) <= 1, "only the page that the older sequence overwrote"
    assert recomputed(runner) < 4


def test_a_preempted_sequence_does_not_wait_for_late_tiers() -> None:
    engine, runner, tiers = a_case()
    tokens: dict[str, list[int]] = {}
    while "young" not in tokens:
        step(engine, tokens)
    tiers.is_late = True
    until_preempted(engine, tokens)
    assert tiers.lookups[-1][0] == "young"
    while engine.scheduler.num_waiting:
        step(engine, tokens)
    assert engine.load().loading == 0
    tiers.answer()  # too late: the sequence runs already and ignores the answer
    finish(engine, tokens)
    assert tiers.started == []
    assert recomputed(runner) > 20


def test_an_answer_during_the_wait_for_pages_is_used() -> None:
    engine, runner, tiers = a_case()
    tokens: dict[str, list[int]] = {}
    while "young" not in tokens:
        step(engine, tokens)
    tiers.is_late = True
    until_preempted(engine, tokens)
    tiers.answer()
    finish(engine, tokens)
    assert len(tiers.started) == 1
    assert recomputed(runner) < 4


@pytest.mark.parametrize("loads_cost", [0.0001, 10.0])
def test_the_price_decides_and_bounds_the_load(loads_cost: float) -> None:
    engine, _, tiers = a_case(LoadPolicy.PRICE)
    for num_bytes in (100, 200, 400, 800):
        engine._prices.observe_load("dram", num_bytes, loads_cost)
    tokens: dict[str, list[int]] = {}
    until_preempted(engine, tokens)
    seen = engine._prices.compute_seconds(0, 24)
    finish(engine, tokens)
    if loads_cost > 1:
        assert tiers.started == []
        return
    ((_, source, first_block, _),) = tiers.started
    assert first_block == 0
    assert source.seconds <= max(seen, engine._prices.compute_seconds(0, 24)) * 1.5


def test_a_load_that_fails_costs_time_only() -> None:
    engine, runner, tiers = a_case()
    tiers.fails = True
    tokens: dict[str, list[int]] = {}
    finish(engine, tokens)
    assert len(tiers.started) == 1
    assert recomputed(runner) > 20


def test_an_abort_of_a_preempted_sequence_drops_its_lookup() -> None:
    engine, _, tiers = a_case()
    tokens: dict[str, list[int]] = {}
    while "young" not in tokens:
        step(engine, tokens)
    tiers.is_late = True
    until_preempted(engine, tokens)
    engine.abort(RequestId("young"))
    tiers.answer()
    while engine.has_work:
        step(engine, tokens)
    assert engine.is_idle


@settings(max_examples=80, deadline=None)
@given(
    st.integers(6, 14),
    st.lists(st.tuples(st.integers(1, 23), st.integers(1, 20)), min_size=2, max_size=6),
    st.lists(st.booleans(), min_size=1, max_size=7),
    st.lists(st.booleans(), min_size=1, max_size=5),
)
def test_any_mix_of_preemptions_and_answers_gives_each_its_own_tokens(
    num_blocks: int, requests: list[tuple[int, int]], late: list[bool], fails: list[bool]
) -> None:
    engine, runner = an_engine(num_blocks=num_blocks, limits=small_limits(token_budget=24, max_chunk_tokens=8))
    tiers, accounts = DictTiers(engine, runner), AccountBook(engine)
    prompts = {str(i): [(7 * i + j) % 90 for j in range(length)] for i, (length, _) in enumerate(requests)}
    for (name, prompt), (_, most) in zip(prompts.items(), requests, strict=True):
        engine.add(a_request(name, prompt, max_tokens=most))
    tokens: dict[str, list[int]] = {}
    for turn in range(2000):
        if not engine.has_work and engine.is_idle:
            break
        tiers.fails = fails[turn % len(fails)]
        tiers.is_late = late[turn % len(late)] and bool(tokens)
        if tiers.lookups and late[turn % len(late) - 1]:
            tiers.answer()  # answers the latest lookup, perhaps a second time
        step(engine, tokens)
        accounts.check()
    assert engine.is_idle
    for (name, prompt), (_, most) in zip(prompts.items(), requests, strict=True):
        assert tokens[name] == expected_tokens(prompt, min(most, num_blocks * 4 - len(prompt)))


@pytest.mark.parametrize("pooling", list(Pooling))
def test_rows_that_are_pooled_are_not_loaded_after_a_preemption(pooling: Pooling) -> None:
    engine, _ = an_engine(num_blocks=12, limits=small_limits(max_chunk_tokens=6))
    engine._prices = PriceBook(LoadPolicy.ALWAYS)
    tiers = DictTiers(engine, engine._pipeline._runner)  # type: ignore[arg-type]
    prompt = list(range(30, 62))
    engine.add(a_request("store", prompt, max_tokens=1))
    for name in ("old", "older"):
        engine.add(a_request(name, OLD[:4], max_tokens=24))
    while len(tiers.kept) < 3:
        engine.step()
    params = PoolingParams(pooling, normalize=False)
    engine.add(EngineRequest.for_vector(RequestId("pooled"), prompt, params))
    found = [u for _ in range(300) if engine.has_work for u in engine.step().updates if u.embedding is not None]
    assert engine.is_idle
    (update,) = found
    assert update.embedding is not None
    expected = {Pooling.LAST: [61, 31], Pooling.MEAN: [45.5, 15.5], Pooling.CLS: [30, 0]}[pooling]
    assert update.embedding.tolist() == expected
    assert (not [name for name, *_ in tiers.started if name == "pooled"]) or pooling is not Pooling.MEAN
