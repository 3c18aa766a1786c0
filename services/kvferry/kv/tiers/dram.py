"""DRAM tier: storage objects in one arena of host memory, `dram://?size=2GiB&tenant_share=50`.

The memory is anonymous, and is faulted in at first use. Beyond the `Tier` interface, the tier exposes its slots: slower
tiers read directly into a reserved slot, and pages are copied directly from a pinned slot.
"""

import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kvferry.core.clock import Clock
from kvferry.core.errors import UsageError
from kvferry.core.ids import BlockHash
from kvferry.core.settings.parsers import size_bytes, whole
from kvferry.kv.tiers.interface.frame import flat
from kvferry.kv.tiers.interface.spec import TierSpec
from kvferry.kv.tiers.interface.tier import ObjectKey, Presence, TierMiss
from kvferry.kv.tiers.policy.shelf import Shelf

_DEFAULT_SIZE = 1 << 30


class DramTier:
    """`Tier` in host memory: objects of `object_bytes` bytes in one arena."""

    name = "dram"

    def __init__(self, size: int, object_bytes: int, *, tenant_share: int = 100) -> None:
        """
        Args:
            size: size of the arena in bytes.
            object_bytes: length of every object.
            tenant_share: percentage of the arena that one tenant may hold.

        Raises:
            UsageError: `size` is smaller than an object.
        """
        num_slots = size // object_bytes
        if num_slots < 1:
            raise UsageError(
                f"tier dram: size={size} bytes is less than one object of {object_bytes} bytes; increase size=",
                field="tier",
            )
        self.object_bytes = object_bytes
        self.capacity_bytes = num_slots * object_bytes
        self._arena = mmap.mmap(-1, self.capacity_bytes)
        self._memory = memoryview(self._arena)
        self._shelf = Shelf(num_slots, tenant_slots=max(1, num_slots * tenant_share // 100))
        self._changed = threading.Condition()  # guards _shelf; not held during copies

    def lookup(self, keys: Sequence[ObjectKey], timeout: float) -> list[Presence]:
        with self._changed:
            return [self._shelf.find(key.name) for key in keys]

    def ask(self, keys: Sequence[ObjectKey]) -> list[Presence]:
        """Look up objects for a request; unlike `lookup`, count the access, which affects eviction."""
        with self._changed:
            self._shelf.ask([key.name for key in keys])
            return [self._shelf.find(key.name) for key in keys]

    def load(self, key: ObjectKey, into: Sequence[memoryview], timeout: float) -> None:
        views = flat(into, self.object_bytes)
        with self.reading(key.name) as content:
            start = 0
            for view in views:
                _copy(view, content[start : start + len(view)])
                start += len(view)

    def store(self, key: ObjectKey, parts: Sequence[memoryview], timeout: float) -> bool:
        views = flat(parts, self.object_bytes)
        slot = self.reserve(key)
        if slot is None:
            return False
        try:
            start = 0
            for part in views:
                _copy(slot[start : start + len(part)], part)
                start += len(part)
        except BaseException:
            self.abandon(key.name)
            raise
        self.commit(key.name)
        return True

    def reserve(self, key: ObjectKey) -> memoryview | None:
        """Reserve a slot for an object until `commit` or `abandon`; return `None` if the object is already stored or is
        rejected."""
        with self._changed:
            slot = self._shelf.reserve(key)
        return None if slot is None else self._slot(slot)

    def commit(self, name: BlockHash) -> None:
        """Publish a reserved object after it has been written completely."""
        with self._changed:
            self._shelf.commit(name)
            self._changed.notify_all()

    def abandon(self, name: BlockHash) -> None:
        """Free the slot of a reserved object that could not be written."""
        with self._changed:
            self._shelf.abandon(name)
            self._changed.notify_all()

    @contextmanager
    def reading(self, name: BlockHash) -> Iterator[memoryview]:
        """Pin an object, so that its bytes do not change within the `with` block.

        Raises:
            TierMiss: the object is not stored, or not complete.
        """
        with self._changed:
            slot = self._shelf.pin(name)
        if slot is None:
            raise TierMiss("the object is not in memory")
        try:
            yield self._slot(slot)
        finally:
            with self._changed:
                self._shelf.unpin(name)

    def wait_written(self, name: BlockHash, timeout: float) -> Presence:
        """Wait while an object is being written, at most `timeout` seconds; return its presence afterwards.

        Args:
            name: name of the object.
            timeout: time limit in seconds.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._shelf.find(name) is not Presence.NOT_YET, timeout)
            return self._shelf.find(name)

    @property
    def num_bytes(self) -> int:
        with self._changed:
            return len(self._shelf) * self.object_bytes

    @property
    def is_idle(self) -> bool:
        """Whether no object is being read or written."""
        with self._changed:
            return self._shelf.is_idle

    def close(self) -> None:
        """Do nothing, since the memory is freed with the last view of it."""

    def _slot(self, number: int) -> memoryview:
        start = number * self.object_bytes
        return self._memory[start : start + self.object_bytes]


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy with numpy, which releases the GIL during the copy, unlike a memoryview."""
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def open_tier(spec: TierSpec, *, object_bytes: int, secret: bytes, clock: Clock) -> DramTier:
    """Create the tier for a `dram://` URL.

    Args:
        spec: the parsed URL.
        object_bytes: bytes per object.
        secret: not used: objects in memory are not authenticated.
        clock: not used: memory has no deadlines.

    Raises:
        UsageError: an option is invalid, or the size is smaller than an object.
    """
    spec.check_options(("size", "tenant_share"))
    if spec.host or spec.path not in {"", "/"}:
        raise UsageError(f"tier {spec.text}: memory has no host and no path; use dram://?size=2GiB", field="tier")
    return DramTier(
        spec.option("size", size_bytes, _DEFAULT_SIZE),
        object_bytes,
        tenant_share=spec.option("tenant_share", whole(1, 100), 100),
    )
