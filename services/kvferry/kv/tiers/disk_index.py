"""What a disk tier's folder holds, oldest use first, and who must go so that the rest fits. Pure."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.core.ids import BlockHash


@dataclass(slots=True)
class Entry:
    """One file."""

    num_bytes: int
    told_at: float
    """When it was used last, in seconds since the Unix epoch, as its modification time tells everybody."""
    used_at: float = 0.0
    """When it was used last, as far as we know ourselves."""

    def __post_init__(self) -> None:
        self.used_at = max(self.used_at, self.told_at)


class DiskIndex:
    """Files by name in the order of use. One owner. A hint: other processes write and remove files, too."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[BlockHash, Entry] = OrderedDict()
        self._num_bytes = 0

    def __contains__(self, name: BlockHash) -> bool:
        """Whether the file was there when last heard of."""
        return name in self._entries

    def __len__(self) -> int:
        """Files."""
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return self._num_bytes

    def rebuild(self, found: Iterable[tuple[BlockHash, Entry]]) -> None:
        """Take over what a scan found, in any order, and forget what it did not find."""
        found = list(found)
        for name, entry in found:
            if name in self._entries:
                entry.used_at = max(entry.used_at, self._entries[name].used_at)
        self._entries.clear()
        self._num_bytes = 0
        for name, entry in sorted(found, key=lambda pair: pair[1].used_at):
            self.add(name, entry)

    def add(self, name: BlockHash, entry: Entry) -> None:
        """A file that was just written, or was found; the most recently used one."""
        self.drop(name)
        self._entries[name] = entry
        self._num_bytes += entry.num_bytes

    def use(self, name: BlockHash, now: float, touch_seconds: float) -> bool:
        """The file is used; whether its modification time should say so, which it need not each time."""
        entry = self._entries.get(name)
        if entry is None:
            return True
        self._entries.move_to_end(name)
        entry.used_at = now
        if abs(now - entry.told_at) < touch_seconds:
            return False
        entry.told_at = now
        return True

    def drop(self, name: BlockHash) -> None:
        """The file is gone; nothing happens when it was not known."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._num_bytes -= entry.num_bytes

    def make_room(self, num_bytes: int) -> list[BlockHash]:
        """Drop what was not used for longest until `num_bytes` more fit; the names, for their files to be removed."""
        gone: list[BlockHash] = []
        while self._entries and self._num_bytes + num_bytes > self._max_bytes:
            name, entry = self._entries.popitem(last=False)
            self._num_bytes -= entry.num_bytes
            gone.append(name)
        return gone
