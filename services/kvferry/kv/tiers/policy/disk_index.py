"""LRU index of a disk tier's files and its eviction decisions. Pure."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.core.ids import BlockHash


@dataclass(slots=True)
class DiskEntry:
    """Index entry of one file."""

    num_bytes: int
    mtime: float
    """Modification time, in seconds since the Unix epoch: the last use visible to other processes."""
    used_at: float = 0.0
    """Last use by this process, in seconds since the Unix epoch."""

    def __post_init__(self) -> None:
        self.used_at = max(self.used_at, self.mtime)


class DiskIndex:
    """Index of files by name, in LRU order. Entries are hints, since other processes also write and remove files. Not
    thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[BlockHash, DiskEntry] = OrderedDict()
        self._num_bytes = 0

    def __contains__(self, name: BlockHash) -> bool:
        """Return whether the file existed when it was last used or scanned."""
        return name in self._entries

    def __len__(self) -> int:
        """Return the number of indexed files."""
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Total bytes of the indexed files."""
        return self._num_bytes

    def rebuild(self, found: Iterable[tuple[BlockHash, DiskEntry]]) -> None:
        """Replace the index with the result of a scan, which may be in any order; keep times of use that are later than
        in the scan."""
        found = list(found)
        for name, entry in found:
            if name in self._entries:
                entry.used_at = max(entry.used_at, self._entries[name].used_at)
        self._entries.clear()
        self._num_bytes = 0
        for name, entry in sorted(found, key=lambda pair: pair[1].used_at):
            self.add(name, entry)

    def add(self, name: BlockHash, entry: DiskEntry) -> None:
        """Add a file that was written or found; it becomes the most recently used file."""
        self.drop(name)
        self._entries[name] = entry
        self._num_bytes += entry.num_bytes

    def use(self, name: BlockHash, now: float, touch_seconds: float) -> bool:
        """Record a use; return whether to update the modification time, at most once per `touch_seconds`.

        Args:
            name: name of the file.
            now: seconds since the Unix epoch.
            touch_seconds: minimum time between two updates of the modification time.
        """
        entry = self._entries.get(name)
        if entry is None:
            return True
        self._entries.move_to_end(name)
        entry.used_at = now
        if abs(now - entry.mtime) < touch_seconds:
            return False
        entry.mtime = now
        return True

    def drop(self, name: BlockHash) -> None:
        """Remove a file from the index, if it is there."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._num_bytes -= entry.num_bytes

    def make_room(self, num_bytes: int) -> list[BlockHash]:
        """Evict least recently used files until `num_bytes` more bytes fit; return their names, for deletion."""
        gone: list[BlockHash] = []
        while self._entries and self._num_bytes + num_bytes > self._max_bytes:
            name, entry = self._entries.popitem(last=False)
            self._num_bytes -= entry.num_bytes
            gone.append(name)
        return gone
