"""What every tier must do; run it over yours. Tiers that store frames pass `frame_suite`, too.

Each check takes a `Rig`: an empty tier with room for about `num_fit` objects.
"""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from kvferry.core.clock import SystemClock
from kvferry.core.ids import BlockHash
from kvferry.kv.tiers.tier import ObjectKey, Presence, Tier, TierError, TierMiss

OBJECT_BYTES = 256 << 10
SECRET = b"a tier secret for tests"
SECONDS = 20.0
_GRACE_SECONDS = 2.0
"""What a call may take beyond its timeout on a busy machine; a tier that hangs takes far longer."""
_POISON = 0xA5


def _random(seed: int | str) -> random.Random:
    return random.Random(seed)  # noqa: S311


@dataclass(slots=True)
class Raw:
    """What lies in the store under a key's name, for checks that damage it."""

    read: Callable[[ObjectKey], bytes]
    write: Callable[[ObjectKey, bytes], None]
    frame_at: int
    """Where in the stored bytes the frame's header begins; pages end with them, or are followed by zeros."""
    pages_at: int


@dataclass(slots=True)
class Rig:
    """A tier and what is known of it."""

    tier: Tier
    num_fit: int
    """Objects that it has room for, at most."""
    reopen: Callable[[], Tier] | None = None
    """The same place as another process would open it; `None`: nothing outlives the tier."""
    raw: Raw | None = None
    stranger: Callable[[], Tier] | None = None
    """The same place opened with another secret."""
    is_exact_lru: bool = True
    """Whether what was not used for longest goes first, always."""
    opened: list[Tier] = field(default_factory=list)

    def again(self) -> Tier:
        """The same place once more; closed with the rig."""
        assert self.reopen is not None
        self.opened.append(self.reopen())
        return self.opened[-1]


def key(number: int, tenant: str = "tenant-a") -> ObjectKey:
    """A name like those that the chain of blocks gives."""
    return ObjectKey(BlockHash(_random(f"{tenant} {number}").randbytes(32)), tenant)


def content(number: int) -> bytes:
    """An object's pages: every object's are its own."""
    return _random(number).randbytes(OBJECT_BYTES)


def cut_up(whole: bytes | bytearray, sizes: Sequence[int]) -> list[memoryview]:
    """Views of it one after the other: of these sizes, then the rest."""
    views, at = [], 0
    for size in (*sizes, len(whole)):
        views.append(memoryview(whole)[at : at + size])
        at += size
    return views


def put(tier: Tier, number: int, tenant: str = "tenant-a") -> bool:
    """Store an object."""
    return tier.store(key(number, tenant), [memoryview(content(number))], SECONDS)


def get(tier: Tier, number: int, tenant: str = "tenant-a") -> bytes:
    """Load an object.

    Raises:
        TierError: as the tier says.
    """
    into = bytearray(OBJECT_BYTES)
    tier.load(key(number, tenant), [memoryview(into)], SECONDS)
    return bytes(into)


def refused(action: Callable[[], object], kind: type[Exception] = TierError) -> Exception:
    """The error that was due.

    Raises:
        AssertionError: there was none.
    """
    try:
        action()
    except kind as error:
        return error
    raise AssertionError(f"a {kind.__name__} was due")


def present(tier: Tier, numbers: Sequence[int]) -> list[int]:
    """Which of the objects a lookup finds."""
    answers = tier.lookup([key(n) for n in numbers], SECONDS)
    return [n for n, answer in zip(numbers, answers, strict=True) if answer is Presence.YES]


@contextmanager
def closing(rig: Rig) -> Iterator[Rig]:
    """The rig, its tiers closed afterwards."""
    try:
        yield rig
    finally:
        for tier in (rig.tier, *rig.opened):
            tier.close()


def check_objects_come_back_exactly(rig: Rig) -> None:
    """In parts, cut up otherwise on the way back, small and empty ones among them."""
    data = content(1)
    assert rig.tier.store(key(1), cut_up(data, [1, 4096, 0, 70_000, 33]), SECONDS)
    for sizes in ([], [100_000], [0, 5, 131_072, 4096], [4096] * 63):
        into = bytearray(OBJECT_BYTES)
        rig.tier.load(key(1), cut_up(into, sizes), SECONDS)
        assert into == data, sizes


def check_lookup_answers_in_order(rig: Rig) -> None:
    """NO before, YES after; nothing asked, nothing answered."""
    assert rig.tier.lookup([], SECONDS) == []
    assert rig.tier.lookup([key(1), key(2)], SECONDS) == [Presence.NO, Presence.NO]
    put(rig.tier, 2)
    put(rig.tier, 4)
    expected = [Presence.NO, Presence.YES, Presence.NO, Presence.YES]
    assert rig.tier.lookup([key(n) for n in (1, 2, 3, 4)], SECONDS) == expected


def check_a_second_store_changes_nothing(rig: Rig) -> None:
    """An object never changes."""
    assert put(rig.tier, 1)
    assert not rig.tier.store(key(1), [memoryview(content(2))], SECONDS)
    assert get(rig.tier, 1) == content(1)


def check_what_is_not_there_is_a_miss(rig: Rig) -> None:
    """And no byte of the buffers changes."""
    into = bytearray([_POISON]) * OBJECT_BYTES
    refused(lambda: rig.tier.load(key(7), [memoryview(into)], SECONDS), TierMiss)
    assert into == bytes([_POISON]) * OBJECT_BYTES


def check_objects_of_tenants_do_not_mix(rig: Rig) -> None:
    """Each finds its own."""
    for number, tenant in ((1, "tenant-a"), (2, "tenant-b"), (3, "tenant-a"), (4, "")):
        assert put(rig.tier, number, tenant)
    for number, tenant in ((1, "tenant-a"), (2, "tenant-b"), (3, "tenant-a"), (4, "")):
        assert get(rig.tier, number, tenant) == content(number)
    refused(lambda: get(rig.tier, 1, "tenant-b"), TierMiss)


def check_its_size_is_bounded(rig: Rig) -> None:
    """Four times what fits: something goes, what stays is whole, and where order is exact the oldest goes."""
    numbers = range(4 * rig.num_fit)
    for number in numbers:
        put(rig.tier, number)
    left = present(rig.tier, numbers)
    assert 0 < len(left) <= rig.num_fit
    assert all(get(rig.tier, n) == content(n) for n in left)
    if rig.is_exact_lru:
        assert left == list(numbers[-len(left) :])
        get(rig.tier, left[0])
        put(rig.tier, 1_000)
        assert present(rig.tier, left[:2]) == [left[0]], "the one that was just read stays"


def check_eviction_does_not_disturb_reads(rig: Rig) -> None:
    """An object that goes while it is read comes exactly, or not at all."""
    failures: list[str] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            for number in range(2 * rig.num_fit):
                try:
                    if get(rig.tier, number) != content(number):
                        failures.append(f"object {number} came wrong")
                except TierError:
                    pass

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for round_ in range(2):
            for number in range(2 * rig.num_fit):
                put(rig.tier, number if round_ else 2 * rig.num_fit - 1 - number)
    finally:
        done.set()
        for reader in readers:
            reader.join(SECONDS)
    assert not failures


def check_many_threads_at_once(rig: Rig) -> None:
    """The same names and others, stored and loaded by eight threads: every load is exact."""
    failures: list[str] = []
    written: list[bool] = []
    count = max(2, min(8, rig.num_fit // 2))

    def work(seed: int) -> None:
        order = list(range(count))
        _random(seed).shuffle(order)
        for number in order:
            try:
                written.append(put(rig.tier, number))
                if get(rig.tier, number) != content(number):
                    failures.append(f"object {number} came wrong")
            except TierMiss:
                pass  # another thread stores it just now
            except Exception as error:
                failures.append(repr(error))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(SECONDS)
    assert not failures
    assert any(written)
    assert present(rig.tier, range(count)) == list(range(count))


def check_nobody_writes_buffers_afterwards(rig: Rig) -> None:
    """Once a load has raised, the buffers are the caller's again."""
    put(rig.tier, 1)
    abandoned = []
    for timeout in (0.0, 1e-6, 1e-5, 1e-4):
        into = bytearray(OBJECT_BYTES)
        try:
            rig.tier.load(key(1), [memoryview(into)], timeout)
            assert into == content(1)
        except TierError:
            into[:] = bytes([_POISON]) * OBJECT_BYTES
            abandoned.append(into)
    for _ in range(8):
        assert get(rig.tier, 1) == content(1)
    assert all(into == bytes([_POISON]) * OBJECT_BYTES for into in abandoned)


def check_timeouts_hold(rig: Rig) -> None:
    """With no time at all every call ends at once: done exactly, or refused."""
    clock = SystemClock()
    put(rig.tier, 1)
    for timeout in (0.0, -1.0, 1e-5):
        started = clock.monotonic()
        assert len(rig.tier.lookup([key(1), key(2)], timeout)) == 2
        into = bytearray(OBJECT_BYTES)
        try:
            rig.tier.load(key(1), [memoryview(into)], timeout)
            assert into == content(1)
        except TierError:
            pass
        with suppress(TierError):
            rig.tier.store(key(3), [memoryview(content(3))], timeout)
        assert clock.monotonic() - started < _GRACE_SECONDS
    assert get(rig.tier, 1) == content(1)
    if rig.tier.lookup([key(3)], SECONDS) == [Presence.YES]:
        assert get(rig.tier, 3) == content(3)


def check_other_lengths_are_refused(rig: Rig) -> None:
    """A caller's mistake, told at once; nothing is stored and nothing written."""
    for wrong in (OBJECT_BYTES - 1, OBJECT_BYTES + 1, 0):
        refused(lambda: rig.tier.store(key(1), [memoryview(bytes(wrong))], SECONDS), Exception)  # noqa: B023
    assert rig.tier.lookup([key(1)], SECONDS) == [Presence.NO]
    put(rig.tier, 1)
    into = bytearray([_POISON]) * (OBJECT_BYTES - 1)
    refused(lambda: rig.tier.load(key(1), [memoryview(into)], SECONDS), Exception)
    assert into == bytes([_POISON]) * (OBJECT_BYTES - 1)


def check_it_counts_its_bytes(rig: Rig) -> None:
    """Nothing at first; about what was stored afterwards."""
    assert rig.tier.num_bytes == 0
    put(rig.tier, 1)
    put(rig.tier, 2)
    assert 2 * OBJECT_BYTES <= rig.tier.num_bytes <= 2 * OBJECT_BYTES + (64 << 10)


def check_closing_twice(rig: Rig) -> None:
    """Closing is idempotent."""
    put(rig.tier, 1)
    rig.tier.close()
    rig.tier.close()


CHECKS: tuple[Callable[[Rig], None], ...] = (
    check_objects_come_back_exactly,
    check_lookup_answers_in_order,
    check_a_second_store_changes_nothing,
    check_what_is_not_there_is_a_miss,
    check_objects_of_tenants_do_not_mix,
    check_its_size_is_bounded,
    check_eviction_does_not_disturb_reads,
    check_many_threads_at_once,
    check_nobody_writes_buffers_afterwards,
    check_timeouts_hold,
    check_other_lengths_are_refused,
    check_it_counts_its_bytes,
    check_closing_twice,
)
