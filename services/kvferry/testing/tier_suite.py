"""Conformance suite for tiers. Tiers that store frames must also pass `frame_suite`.

Each check takes a `TierRig`: an empty tier with a capacity of about `num_fit` objects.
"""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from kvferry.core.clock import SystemClock
from kvferry.core.ids import BlockHash
from kvferry.kv.tiers.interface.tier import ObjectKey, Presence, Tier, TierError, TierMiss

OBJECT_BYTES = 256 << 10
SECRET = b"a tier secret for tests"
SECONDS = 20.0
_GRACE_SECONDS = 2.0
"""Tolerance beyond a call's timeout on a busy machine, in seconds; a tier that hangs exceeds it by far."""
_POISON = 0xA5


def _random(seed: int | str) -> random.Random:
    return random.Random(seed)  # noqa: S311


@dataclass(slots=True)
class Raw:
    """Access to stored bytes by key, for checks that damage them."""

    read: Callable[[ObjectKey], bytes]
    write: Callable[[ObjectKey, bytes], None]
    frame_at: int
    """Offset of the frame's header in the stored bytes. The stored bytes end with pages or zero padding."""
    pages_at: int


@dataclass(slots=True)
class TierRig:
    """A tier under test and its properties."""

    tier: Tier
    num_fit: int
    """Maximum number of objects in the tier."""
    reopen: Callable[[], Tier] | None = None
    """Function that opens the same store, as a second process would; `None` if the tier is not persistent."""
    raw: Raw | None = None
    stranger: Callable[[], Tier] | None = None
    """Function that opens the same store with a different secret; `None` if the tier has no secret."""
    is_exact_lru: bool = True
    """Whether eviction is exactly LRU."""
    opened: list[Tier] = field(default_factory=list)

    def again(self) -> Tier:
        """Open the same store a second time; it is closed with the rig."""
        assert self.reopen is not None
        self.opened.append(self.reopen())
        return self.opened[-1]


def key(number: int, tenant: str = "tenant-a") -> ObjectKey:
    """Return the key of test object `number`, with a random 32-byte name."""
    return ObjectKey(BlockHash(_random(f"{tenant} {number}").randbytes(32)), tenant)


def content(number: int) -> bytes:
    """Return the content of test object `number`; differs between objects."""
    return _random(number).randbytes(OBJECT_BYTES)


def cut_up(whole: bytes | bytearray, sizes: Sequence[int]) -> list[memoryview]:
    """Split `whole` into consecutive views of these sizes and a view of the rest."""
    views, at = [], 0
    for size in (*sizes, len(whole)):
        views.append(memoryview(whole)[at : at + size])
        at += size
    return views


def put(tier: Tier, number: int, tenant: str = "tenant-a") -> bool:
    """Store test object `number`; return the tier's result."""
    return tier.store(key(number, tenant), [memoryview(content(number))], SECONDS)


def get(tier: Tier, number: int, tenant: str = "tenant-a") -> bytes:
    """Load test object `number`.

    Raises:
        TierError: the tier failed.
    """
    into = bytearray(OBJECT_BYTES)
    tier.load(key(number, tenant), [memoryview(into)], SECONDS)
    return bytes(into)


def refused(action: Callable[[], object], kind: type[Exception] = TierError) -> Exception:
    """Call `action` and return the exception that it raises, which must be of type `kind`.

    Raises:
        AssertionError: no exception was raised.
    """
    try:
        action()
    except kind as error:
        return error
    raise AssertionError(f"expected a {kind.__name__}")


def present(tier: Tier, numbers: Sequence[int]) -> list[int]:
    """Return the numbers of the objects that a lookup finds."""
    answers = tier.lookup([key(n) for n in numbers], SECONDS)
    return [n for n, answer in zip(numbers, answers, strict=True) if answer is Presence.YES]


@contextmanager
def closing(rig: TierRig) -> Iterator[TierRig]:
    """Yield the rig, and close its tiers afterwards."""
    try:
        yield rig
    finally:
        for tier in (rig.tier, *rig.opened):
            tier.close()


def check_objects_come_back_exactly(rig: TierRig) -> None:
    """Check that an object stored from several buffers is loaded exactly into buffers of different sizes, including
    empty ones."""
    data = content(1)
    assert rig.tier.store(key(1), cut_up(data, [1, 4096, 0, 70_000, 33]), SECONDS)
    for sizes in ([], [100_000], [0, 5, 131_072, 4096], [4096] * 63):
        into = bytearray(OBJECT_BYTES)
        rig.tier.load(key(1), cut_up(into, sizes), SECONDS)
        assert into == data, sizes


def check_lookup_answers_in_order(rig: TierRig) -> None:
    """Check that a lookup returns NO before a store and YES after it, and that an empty lookup returns an empty
    list."""
    assert rig.tier.lookup([], SECONDS) == []
    assert rig.tier.lookup([key(1), key(2)], SECONDS) == [Presence.NO, Presence.NO]
    put(rig.tier, 2)
    put(rig.tier, 4)
    expected = [Presence.NO, Presence.YES, Presence.NO, Presence.YES]
    assert rig.tier.lookup([key(n) for n in (1, 2, 3, 4)], SECONDS) == expected


def check_a_second_store_changes_nothing(rig: TierRig) -> None:
    """Check that a second store under an existing key returns false and does not change the object."""
    assert put(rig.tier, 1)
    assert not rig.tier.store(key(1), [memoryview(content(2))], SECONDS)
    assert get(rig.tier, 1) == content(1)


def check_what_is_not_there_is_a_miss(rig: TierRig) -> None:
    """Check that a load of a missing object raises `TierMiss` and does not change the buffers."""
    into = bytearray([_POISON]) * OBJECT_BYTES
    refused(lambda: rig.tier.load(key(7), [memoryview(into)], SECONDS), TierMiss)
    assert into == bytes([_POISON]) * OBJECT_BYTES


def check_objects_of_tenants_do_not_mix(rig: TierRig) -> None:
    """Check that each tenant finds only its own objects."""
    for number, tenant in ((1, "tenant-a"), (2, "tenant-b"), (3, "tenant-a"), (4, "")):
        assert put(rig.tier, number, tenant)
    for number, tenant in ((1, "tenant-a"), (2, "tenant-b"), (3, "tenant-a"), (4, "")):
        assert get(rig.tier, number, tenant) == content(number)
    refused(lambda: get(rig.tier, 1, "tenant-b"), TierMiss)


def check_its_size_is_bounded(rig: TierRig) -> None:
    """Check that, after storing four times the capacity, the remaining objects are intact and exact LRU has evicted the
    oldest ones."""
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
        assert present(rig.tier, left[:2]) == [left[0]], "the object that was just read stays"


def check_eviction_does_not_disturb_reads(rig: TierRig) -> None:
    """Check that a read whose object is evicted during the read returns exact content or raises."""
    failures: list[str] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            for number in range(2 * rig.num_fit):
                try:
                    if get(rig.tier, number) != content(number):
                        failures.append(f"object {number} has wrong content")
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


def check_many_threads_at_once(rig: TierRig) -> None:
    """Check that every load is exact while eight threads store and load shared and separate names."""
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
                    failures.append(f"object {number} has wrong content")
            except TierMiss:
                pass  # a different thread is storing it
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


def check_buffers_are_not_written_afterwards(rig: TierRig) -> None:
    """Check that the buffers of a load are no longer written after it has raised."""
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


def check_timeouts_hold(rig: TierRig) -> None:
    """Check that with a timeout of zero every call returns or raises immediately."""
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


def check_other_lengths_are_refused(rig: TierRig) -> None:
    """Check that wrong lengths raise and that nothing is stored or written."""
    for wrong in (OBJECT_BYTES - 1, OBJECT_BYTES + 1, 0):
        refused(lambda: rig.tier.store(key(1), [memoryview(bytes(wrong))], SECONDS), Exception)  # noqa: B023
    assert rig.tier.lookup([key(1)], SECONDS) == [Presence.NO]
    put(rig.tier, 1)
    into = bytearray([_POISON]) * (OBJECT_BYTES - 1)
    refused(lambda: rig.tier.load(key(1), [memoryview(into)], SECONDS), Exception)
    assert into == bytes([_POISON]) * (OBJECT_BYTES - 1)


def check_it_counts_its_bytes(rig: TierRig) -> None:
    """Check that the byte count is zero at first and about equal to the stored bytes afterwards."""
    assert rig.tier.num_bytes == 0
    put(rig.tier, 1)
    put(rig.tier, 2)
    assert 2 * OBJECT_BYTES <= rig.tier.num_bytes <= 2 * OBJECT_BYTES + (64 << 10)


def check_closing_twice(rig: TierRig) -> None:
    """Check that closing is idempotent."""
    put(rig.tier, 1)
    rig.tier.close()
    rig.tier.close()


CHECKS: tuple[Callable[[TierRig], None], ...] = (
    check_objects_come_back_exactly,
    check_lookup_answers_in_order,
    check_a_second_store_changes_nothing,
    check_what_is_not_there_is_a_miss,
    check_objects_of_tenants_do_not_mix,
    check_its_size_is_bounded,
    check_eviction_does_not_disturb_reads,
    check_many_threads_at_once,
    check_buffers_are_not_written_afterwards,
    check_timeouts_hold,
    check_other_lengths_are_refused,
    check_it_counts_its_bytes,
    check_closing_twice,
)
