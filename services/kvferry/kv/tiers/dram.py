"""The DRAM tier: objects in one arena of host memory, `dram://?size=2GiB&tenant_share=50`.

The memory is anonymous and only backed as it is used. Beside what every tier does, it lends its slots: a slower tier
reads straight into a reserved slot, and pages are copied straight out of a pinned one.
"""

import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kvferry.core.clock import Clock
from kvferry.core.errors import UsageError
from kvferry.core.ids import BlockHash
from kvferry.core.settings import size_bytes, whole
from kvferry.kv.tiers.frame import flat
from kvferry.kv.tiers.shelf import Shelf
from kvferry.kv.tiers.spec import TierSpec
from kvferry.kv.tiers.tier import ObjectKey, Presence, TierMiss

_DEFAULT_SIZE = 1 << 30


class DramTier:
    """Objects of `object_bytes` each in an arena."""

    name = "dram"

    def __init__(self, size: int, object_bytes: int, *, tenant_share: int = 100) -> None:
        """
        Args:
            size: bytes of the arena.
            tenant_share: percent of it that one tenant may hold.

        Raises:
            UsageError: not even one object fits.
        """
        num_slots = size // object_bytes
        if num_slots < 1:
            raise UsageError(
                f"tier dram: size={size} bytes holds no object of {object_bytes} bytes; give it more", field="tier"
            )
        self.object_bytes = object_bytes
        self.capacity_bytes = num_slots * object_bytes
        self._arena = mmap.mmap(-1, self.capacity_bytes)
        self._memory = memoryview(self._arena)
        self._shelf = Shelf(num_slots, tenant_slots=max(1, num_slots * tenant_share // 100))
        self._changed = threading.Condition()  # guards _shelf; nothing is copied while it is held

    def lookup(self, keys: Sequence[ObjectKey], timeout: float) -> list[Presence]:
        with self._changed:
            return [self._shelf.find(key.name) for key in keys]

    def ask(self, keys: Sequence[ObjectKey]) -> list[Presence]:
        """As `lookup`, for a request that wants these objects: it counts for what stays here."""
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
        """A slot to write an object into, to be followed by `commit` or `abandon`; `None`: it is here or declined."""
        with self._changed:
            slot = self._shelf.reserve(key)
        return None if slot is None else self._slot(slot)

    def commit(self, name: BlockHash) -> None:
        """The reserved object is whole."""
        with self._changed:
            self._shelf.commit(name)
            self._changed.notify_all()

    def abandon(self, name: BlockHash) -> None:
        """The reserved object does not come."""
        with self._changed:
            self._shelf.abandon(name)
            self._changed.notify_all()

    @contextmanager
    def reading(self, name: BlockHash) -> Iterator[memoryview]:
        """An object's bytes, which stay as they are within the `with` block.

        Raises:
            TierMiss: it is not here, or not whole.
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
        """Wait while somebody writes an object, at most `timeout` seconds; where it stands then."""
        with self._changed:
            self._changed.wait_for(lambda: self._shelf.find(name) is not Presence.NOT_YET, timeout)
            return self._shelf.find(name)

    @property
    def num_bytes(self) -> int:
        with self._changed:
            return len(self._shelf) * self.object_bytes

    @property
    def is_idle(self) -> bool:
        """Whether nobody reads or writes here."""
        with self._changed:
            return self._shelf.is_idle

    def close(self) -> None:
        """The memory goes when the last view of it does."""

    def _slot(self, number: int) -> memoryview:
        start = number * self.object_bytes
        return self._memory[start : start + self.object_bytes]


def _copy(target: memoryview, source: memoryview) -> None:
    """numpy gives up the interpreter lock while it copies; a memoryview does not."""
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def open_tier(spec: TierSpec, *, object_bytes: int, secret: bytes, clock: Clock) -> DramTier:
    """The tier that a `dram://` URL describes.

    Raises:
        UsageError: an option is wrong, or no object fits.
    """
    spec.check_options(("size", "tenant_share"))
    if spec.host or spec.path not in {"", "/"}:
        raise UsageError(f"tier {spec.text}: memory has no host and no path; write dram://?size=2GiB", field="tier")
    return DramTier(
        spec.option("size", size_bytes, _DEFAULT_SIZE),
        object_bytes,
        tenant_share=spec.option("tenant_share", whole(1, 100), 100),
    )
