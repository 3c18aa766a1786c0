"""The tier stack under the real engine: blocks are stored and loaded, and a failing tier costs time only."""

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from harness.fakes.engines import ArithmeticRunner, a_request, an_engine, attach, expected_tokens, small_limits
from harness.idle import assert_idle

from kvferry.core.clock import SystemClock
from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockHash, BlockId, RequestId
from kvferry.engine.engine import Engine
from kvferry.engine.schedule.plan.pipeline import Pipeline
from kvferry.engine.schedule.step.step import StepPlan, StepResult
from kvferry.kv.interface.connector import LoadOutcome, PagesQuiet
from kvferry.kv.interface.tiering import TierAnswer, TierSource
from kvferry.kv.tiers.dram import DramTier
from kvferry.kv.tiers.interface.tier import ObjectKey, Presence, Tier, TierError, TierMiss
from kvferry.kv.tiers.stack import TierStack

BLOCK_TOKENS = 4
OBJECT_BLOCKS = 2
BLOCK_BYTES = BLOCK_TOKENS * 8
SECONDS = 20.0


@dataclass
class ScriptedTier:
    """A slow tier that holds objects in a dictionary and fails on request."""

    name: str = "disk"
    objects: dict[bytes, bytes] = field(default_factory=dict)
    fail_loads: int = 0
    fail_from: int = 10**9
    """The number of loads after which all loads fail."""
    hold: threading.Event | None = None
    """Loads wait for this event."""
    hang: threading.Event | None = None
    """Lookups wait for this event without regard to their timeout."""
    num_loads: int = 0
    broken: bool = False

    def lookup(self, keys: Sequence[ObjectKey], timeout: float) -> list[Presence]:
        if self.hang is not None:
            self.hang.wait(SECONDS)
        if self.broken:
            raise OSError("an error that tiers must not raise")
        return [Presence.YES if k.name in self.objects else Presence.NO for k in keys]

    def load(self, key: ObjectKey, into: Sequence[memoryview], timeout: float) -> None:
        self.num_loads += 1
        if self.hold is not None and not self.hold.wait(timeout):
            raise TierError("too slow")
        if self.num_loads <= self.fail_loads or self.num_loads > self.fail_from:
            raise TierError("flipped bits")
        if key.name not in self.objects:
            raise TierMiss("gone")
        start = 0
        for view in into:
            view[:] = self.objects[key.name][start : start + len(view)]
            start += len(view)

    def store(self, key: ObjectKey, parts: Sequence[memoryview], timeout: float) -> bool:
        if self.broken:
            raise TierError("disk full")
        if key.name in self.objects:
            return False
        self.objects[key.name] = b"".join(parts)
        return True

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.objects.values()))

    def close(self) -> None:
        pass


class BytesRunner:
    """Runs `harness.fakes.engines` over real bytes: 8 bytes per slot hold the token plus one, or zero if empty."""

    def __init__(self, inner: ArithmeticRunner, pages: memoryview) -> None:
        self.inner = inner
        self._slots = pages.cast("q")

    def run(self, plan: StepPlan) -> StepResult:
        lists = [ids for item in plan.scheduled for ids in (item.block_ids, *item.further_ids)]
        blocks = {b for ids in lists for b in ids if b >= 0}
        for block in blocks:
            read = self._slots[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS].tolist()
            self.inner.pages[block] = [None if value == 0 else value - 1 for value in read]
        result = self.inner.run(plan)
        for block in blocks:
            for slot, token in enumerate(self.inner.pages[block]):
                self._slots[block * BLOCK_TOKENS + slot] = 0 if token is None else token + 1
        return result


class Bench:
    """An engine whose pages are real bytes, with tiers; messages reach it through a queue, as in a worker."""

    def __init__(
        self, *tiers: Tier, num_blocks: int = 32, windows: tuple[int | None, ...] = (None,), chunk: int = 64
    ) -> None:
        self.engine, self.runner = an_engine(
            num_blocks=num_blocks,
            block_tokens=BLOCK_TOKENS,
            windows=windows,
            limits=small_limits(max_chunk_tokens=chunk),
        )
        self.pages = memoryview(bytearray(num_blocks * BLOCK_BYTES))
        self.engine._pipeline = Pipeline(BytesRunner(self.runner, self.pages), self.engine.allocator)
        self.messages: list[object] = []
        self._arrived = threading.Condition()
        self.stack = TierStack(
            tiers,
            self.pages,
            block_bytes=BLOCK_BYTES,
            object_blocks=OBJECT_BLOCKS,
            block_pages=len(windows),
            listener=self._listen,
            clock=SystemClock(),
        )
        attach(self.engine, tiers=self.stack)

    def _listen(self, message: object) -> None:
        with self._arrived:
            self.messages.append(message)
            self._arrived.notify_all()

    def run(self, name: str, prompt: list[int], count: int = 4) -> tuple[list[int], list[LoadOutcome]]:
        """Run one request, wait until the tiers are idle, and return its tokens and the outcomes of its loads."""
        self.engine.add(a_request(name, prompt, max_tokens=count))
        return self.until_idle(name)

    def until_idle(self, name: str) -> tuple[list[int], list[LoadOutcome]]:
        tokens: list[int] = []
        loads: list[LoadOutcome] = []
        for _ in range(10_000):
            output = self.engine.step()
            loads += output.loads
            tokens += [t.token_id for u in output.updates if u.request_id == name for t in u.tokens]
            self.engine.check_integrity()
            if self.engine.is_idle:
                self._settle()
                return tokens, loads
            if not output.ran:
                self._wait()
            self._post()
        raise AssertionError(f"not idle: {self.engine.load()}")

    def _settle(self) -> None:
        """Wait until all stores have ended."""
        pause = threading.Event()
        for _ in range(int(SECONDS / 0.002)):
            if not self.stack.num_active:
                return
            pause.wait(0.002)
        raise AssertionError(f"{self.stack.num_active} stores are still under way")

    def _wait(self) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: bool(self.messages), SECONDS), (
                f"no message arrived: {self.engine.load()}"
            )

    def _post(self) -> None:
        with self._arrived:
            messages, self.messages = self.messages, []
        for message in messages:
            self.engine.post(message)

    def forget_pages(self) -> None:
        """Evict all blocks from the engine's cache and overwrite the pages."""
        pool = self.engine.allocator.pool
        taken = pool.allocate(pool.num_blocks)
        assert taken is not None
        self.pages[:] = b"\x07" * len(self.pages)
        pool.release(taken)

    def close(self) -> None:
        self.stack.close()
        assert_idle(self.engine)


PROMPT = list(range(3, 3 + 21))  # five full blocks and one token; two objects of two blocks


@pytest.fixture
def slow() -> ScriptedTier:
    return ScriptedTier()


def dram(objects: int = 64, block_pages: int = 1) -> DramTier:
    size = OBJECT_BLOCKS * block_pages * BLOCK_BYTES
    return DramTier(objects * size, size)


@pytest.fixture(params=["dram", "disk", "dram+disk"])
def bench(request: pytest.FixtureRequest, slow: ScriptedTier) -> Iterator[Bench]:
    kinds: dict[str, tuple[Tier, ...]] = {"dram": (dram(),), "disk": (slow,), "dram+disk": (dram(), slow)}
    made = Bench(*kinds[request.param])
    yield made
    made.close()


def test_a_prefix_that_was_evicted_is_loaded_from_the_tiers(bench: Bench) -> None:
    tokens, loads = bench.run("first", PROMPT)
    assert tokens == expected_tokens(PROMPT, 4)
    assert loads == []
    bench.forget_pages()
    again, loads = bench.run("again", PROMPT)
    assert again == expected_tokens(PROMPT, 4)
    assert [(o.failure, o.num_blocks) for o in loads] == [(None, 4)]
    computed = [i.num_scheduled for step in bench.runner.steps[-4:] for i in step.scheduled]
    assert computed == [21 - 16, 1, 1, 1], "only tokens outside of the objects are computed"


@pytest.mark.parametrize("windows", [(None, 6), (None, 1, 17)])
@pytest.mark.parametrize("kind", ["dram", "disk"])
def test_objects_have_the_pages_of_all_groups_of_layers(
    windows: tuple[int | None, ...], kind: str, slow: ScriptedTier
) -> None:
    """The runner checks what rows read in every group, also after a prefix of any length."""
    tier = dram(block_pages=len(windows)) if kind == "dram" else slow
    bench = Bench(tier, num_blocks=48, windows=windows, chunk=4)
    tokens, _ = bench.run("first", PROMPT, 9)
    assert tokens == expected_tokens(PROMPT, 9)
    for end, blocks in ((21, 4), (15, 2), (21, 4)):
        bench.forget_pages()
        again, loads = bench.run(f"again {end}", PROMPT[:end], 9)
        assert again == expected_tokens(PROMPT[:end], 9)
        assert [(o.failure, o.num_blocks) for o in loads] == [(None, blocks * len(windows))]
    slow.fail_from = slow.num_loads + 1
    bench.forget_pages()
    again, loads = bench.run("partly", PROMPT, 9)
    assert again == expected_tokens(PROMPT, 9)
    if kind == "disk":
        assert [o.num_blocks for o in loads] == [2 * len(windows)], "the second object is computed"
    bench.close()


def test_a_load_that_needs_too_many_pages_at_once_is_computed() -> None:
    bench = Bench(dram(block_pages=3), num_blocks=20, windows=(None, 3, 3), chunk=4)
    prompt = list(range(3, 3 + 29))  # eight blocks: 24 pages in all groups, of which windows keep a part
    tokens, _ = bench.run("first", prompt, 2)
    bench.forget_pages()
    assert bench.run("again", prompt, 2) == (tokens, [])
    assert tokens == expected_tokens(prompt, 2)
    bench.close()


def test_a_preempted_sequence_is_loaded_from_dram() -> None:
    bench = Bench(dram(), num_blocks=12)
    young = list(range(60, 80))
    bench.engine.add(a_request("old", PROMPT, max_tokens=27))
    bench.engine.add(a_request("young", young, max_tokens=8))
    tokens: dict[str, list[int]] = {"old": [], "young": []}
    loads: list[LoadOutcome] = []
    for _ in range(1000):
        output = bench.engine.step()
        loads += output.loads
        for update in output.updates:
            tokens[update.request_id].extend(t.token_id for t in update.tokens)
        bench.engine.check_integrity()
        if bench.engine.is_idle:
            break
        if not output.ran:
            bench._wait()
        bench._settle()  # the result must not depend on the speed of the tier's threads
        bench._post()
    assert tokens == {"old": expected_tokens(PROMPT, 27), "young": expected_tokens(young, 8)}
    assert bench.engine.scheduler.num_preemptions == 1
    assert [(o.request_id, o.failure, o.source) for o in loads] == [("young", None, "dram")]
    (back,) = (
        i for s in bench.runner.steps[1:] for i in s.scheduled if i.request_id == "young" and i.num_scheduled > 1
    )
    assert back.num_computed == loads[0].num_blocks * BLOCK_TOKENS > 0
    bench.close()


def test_generated_tokens_are_stored_too(bench: Bench) -> None:
    tokens, _ = bench.run("first", PROMPT, count=12)
    bench.forget_pages()
    longer = [*PROMPT, *tokens[:-1], 1, 2, 3]
    again, loads = bench.run("second turn", longer)
    assert again == expected_tokens(longer, 4)
    assert loads[0].num_blocks == 8


def test_an_object_is_stored_once(bench: Bench, slow: ScriptedTier) -> None:
    for turn in range(3):
        bench.run(f"turn {turn}", PROMPT)
        bench.forget_pages()
    assert all(stats.stores in {0, 3} for stats in bench.stack.stats.values())
    assert sum(stats.stores for stats in bench.stack.stats.values()) >= 3


@pytest.mark.parametrize("how", ["a lookup", "a load", "a failed store"])
def test_objects_that_a_tier_lost_are_stored_again(how: str, slow: ScriptedTier) -> None:
    """A tier may lose objects: the server restarts, objects expire, or damaged ones are removed."""
    bench = Bench(slow)
    slow.broken = how == "a failed store"
    bench.run("first", PROMPT)
    slow.broken = False
    bench.forget_pages()
    if how == "a lookup":
        slow.objects.clear()
    elif how == "a load":
        slow.num_loads, slow.fail_loads = 0, 2
        bench.run("damaged", PROMPT)
        slow.objects.clear()
        bench.forget_pages()
    bench.run("computed", PROMPT)
    assert len(slow.objects) >= 2
    bench.forget_pages()
    again, loads = bench.run("again", PROMPT)
    assert again == expected_tokens(PROMPT, 4)
    assert [(o.failure, o.num_blocks) for o in loads] == [(None, 4)]
    bench.close()


def test_a_local_hit_inside_an_object_is_kept(bench: Bench) -> None:
    bench.run("first", PROMPT)
    bench.forget_pages()
    bench.run("short", PROMPT[:13])  # three blocks are cached: one and a half objects
    again, loads = bench.run("again", PROMPT)
    assert again == expected_tokens(PROMPT, 4)
    assert [(o.failure, o.num_blocks) for o in loads] == [(None, 1)]


def test_a_local_hit_that_is_evicted_after_asking_is_not_mistaken_for_a_load(slow: ScriptedTier) -> None:
    bench = Bench(slow)
    bench.run("first", PROMPT)
    bench.forget_pages()
    bench.run("head", PROMPT[:9])  # the first object is cached, and the second one is looked up
    bench.engine.add(a_request("again", PROMPT))
    bench._wait()
    bench.forget_pages()  # now the first object is not cached
    tokens, _ = bench.until_idle("again")
    assert tokens == expected_tokens(PROMPT, 4)
    bench.close()


def test_a_tier_gets_a_whole_object_whatever_part_of_it_is_cached() -> None:
    class Checking(ScriptedTier):
        """A tier that checks the content in its destination, as tiers that store frames do."""

        def load(self, key: ObjectKey, into: Sequence[memoryview], timeout: float) -> None:
            super().load(key, into, timeout)
            assert b"".join(into) == self.objects[key.name]

    key = ObjectKey(BlockHash(b"n" * 32), "")
    pages = memoryview(bytearray(8 * BLOCK_BYTES))
    tier = Checking(objects={key.name: bytes(range(4 * BLOCK_BYTES))})
    messages: queue.SimpleQueue[object] = queue.SimpleQueue()
    stack = TierStack(
        [tier], pages, block_bytes=BLOCK_BYTES, object_blocks=4, listener=messages.put, clock=SystemClock()
    )
    for first in range(4):
        targets = [BlockId(block) for block in range(4 + first, 8)]
        stack.start(first, RequestId("r"), TierSource(0, (key,), ("disk",), SECONDS), first, targets)
        outcome = messages.get(timeout=SECONDS)
        assert isinstance(outcome, LoadOutcome)
        assert (outcome.failure, outcome.num_blocks) == (None, 4 - first)
        assert messages.get(timeout=SECONDS) == PagesQuiet(first)
    assert pages[4 * BLOCK_BYTES :] == tier.objects[key.name]
    with pytest.raises(InvariantBroken, match="do not cover"):
        stack.start(9, RequestId("r"), TierSource(0, (key,), ("disk",), SECONDS), 2, [BlockId(6)])
    stack.close()


def test_another_tenants_blocks_are_not_found(bench: Bench) -> None:
    bench.run("first", PROMPT)
    bench.forget_pages()
    bench.engine.add(a_request("theirs", PROMPT, scope="other"))
    tokens, loads = bench.until_idle("theirs")
    assert tokens == expected_tokens(PROMPT, 4)
    assert loads == []


@pytest.mark.parametrize("with_memory", [True, False])
def test_a_load_that_breaks_costs_time_only(with_memory: bool, slow: ScriptedTier) -> None:
    bench = Bench(slow)
    bench.run("first", PROMPT)
    bench.close()
    slow.fail_from = 1  # the load of the second object fails
    bench = Bench(dram(), slow) if with_memory else Bench(slow)
    bench.stack._loading._max_workers = 1
    tokens, loads = bench.run("again", PROMPT)
    assert tokens == expected_tokens(PROMPT, 4)
    (outcome,) = loads
    assert outcome.failure is not None
    assert "flipped bits" in outcome.failure
    assert outcome.num_blocks in {0, 2}
    bench.close()


def test_a_tier_that_is_out_of_order_is_passed_over(slow: ScriptedTier) -> None:
    slow.broken = True
    bench = Bench(slow)
    for name in ("first", "again"):
        tokens, loads = bench.run(name, PROMPT)
        assert tokens == expected_tokens(PROMPT, 4)
        assert loads == []
        bench.forget_pages()
    assert bench.stack.stats["disk"].failures >= 2
    bench.close()


def test_lookups_that_hang_delay_no_request_beyond_the_bound(slow: ScriptedTier) -> None:
    bench = Bench(slow)
    slow.hang = threading.Event()
    for name in ("a", "b", "c"):  # more requests than threads for lookups
        tokens, loads = bench.run(name, [ord(name) % 7, *PROMPT])
        assert tokens == expected_tokens([ord(name) % 7, *PROMPT], 4)
        assert loads == []
    slow.hang.set()
    bench.close()


def test_a_slow_object_is_given_up_at_the_deadline(slow: ScriptedTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.engine.schedule.loads.tier_loads._FORCED_SECONDS", 0.05)
    bench = Bench(slow)
    bench.run("first", PROMPT)
    bench.forget_pages()
    slow.hold = threading.Event()
    tokens, loads = bench.run("again", PROMPT)
    assert tokens == expected_tokens(PROMPT, 4)
    assert loads[0].failure is not None
    bench.close()


def test_an_aborted_request_leaves_no_state(slow: ScriptedTier) -> None:
    bench = Bench(dram(), slow)
    bench.run("first", PROMPT)
    bench.close()
    bench = Bench(dram(), slow)
    slow.hold = threading.Event()
    bench.engine.add(a_request("gone", PROMPT))
    bench._wait()  # the answer to the lookup
    bench._post()
    bench.engine.step()
    bench.engine.abort(RequestId("gone"))
    slow.hold.set()
    bench.until_idle("gone")
    bench.close()


def test_two_requests_share_one_read(slow: ScriptedTier) -> None:
    bench = Bench(dram(), slow)
    bench.run("first", PROMPT)
    bench.close()
    bench = Bench(dram(), slow)
    slow.hold = threading.Event()
    slow.num_loads = 0
    for name in ("a", "b"):
        bench.engine.add(a_request(name, PROMPT))
    threading.Timer(0.05, slow.hold.set).start()
    tokens, _ = bench.until_idle("a")
    assert tokens == expected_tokens(PROMPT, 4)
    assert slow.num_loads == 2
    bench.close()


def test_a_stack_without_tiers_or_in_the_wrong_order_is_refused(slow: ScriptedTier) -> None:
    for wrong in ((), (slow, dram())):
        with pytest.raises(InvariantBroken, match="DRAM tier must be the first"):
            Bench(*wrong)


def test_too_many_stores_are_dropped_and_counted(slow: ScriptedTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.kv.tiers.write_behind._MAX_STORES", 0)
    bench = Bench(slow)
    tokens, _ = bench.run("first", PROMPT)
    assert tokens == expected_tokens(PROMPT, 4)
    assert bench.stack.stats["disk"].dropped == 3
    bench.close()


def test_dram_waits_for_a_writer_only_so_long() -> None:
    tier = dram(1)
    key = ObjectKey(BlockHash(b"n" * 32), "")
    assert tier.wait_written(key.name, 0.0) is Presence.NO
    assert tier.reserve(key) is not None
    assert tier.wait_written(key.name, 0.01) is Presence.NOT_YET
    threading.Timer(0.02, tier.abandon, [key.name]).start()
    assert tier.wait_written(key.name, SECONDS) is Presence.NO


def test_a_tiers_message_to_an_engine_without_tiers_is_an_error() -> None:
    engine: Engine
    engine, _ = an_engine()
    engine.post(TierAnswer(RequestId("r"), ()))
    with pytest.raises(InvariantBroken, match="without tiers"):
        engine.step()
