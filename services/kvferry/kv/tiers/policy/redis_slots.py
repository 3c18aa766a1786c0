"""Redis Cluster routing: hash slots, the slot map, and redirections. Pure."""

import binascii
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

NUM_SLOTS = 16384
MAX_RANGES = 4096
"""Maximum number of ranges in a slot map; larger maps are rejected."""

Address = tuple[str, int]
"""Host and port."""


def key_slot(key: bytes) -> int:
    """Compute the hash slot of a key: CRC-16/XMODEM of the key, or of its hash tag, which is the text between its first
    braces."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return binascii.crc_hqx(key, 0) % NUM_SLOTS


@dataclass(frozen=True, slots=True)
class Redirection:
    """Redirection of a command to the server that has the slot."""

    slot: int
    address: Address
    is_final: bool
    """`True` for `MOVED`, a permanent redirection; `False` for `ASK`, for one command while the slot is migrated."""


def parse_redirection(error: str, server: Address) -> Redirection | None:
    """Parse `MOVED 3999 10.0.0.7:6381` or `ASK ...`; `None` for other errors or a malformed redirection.

    If the host in the reply is empty, the host of `server`, which sent the error, is used.

    Args:
        error: text of the server's error.
        server: address of the server that sent it.
    """
    words = error.split(" ")
    if len(words) != 3 or words[0] not in ("MOVED", "ASK") or not words[1].isdecimal():
        return None
    host, colon, port = words[2].rpartition(":")
    slot = int(words[1])
    if not colon or not port.isdecimal() or slot >= NUM_SLOTS or not 0 < int(port) < 65536:
        return None
    return Redirection(slot, (host.strip("[]") or server[0], int(port)), words[0] == "MOVED")


class SlotMap:
    """Map from slots to addresses. Not thread-safe."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._addresses: list[Address] = []
        self._moved: dict[int, Address] = {}

    def replace(self, reply: object, server: Address) -> None:
        """Replace the map with the reply of `server` to `CLUSTER SLOTS`; its host is used where the reply has none.

        Args:
            reply: the reply to `CLUSTER SLOTS`.
            server: address of the server that sent it.

        Raises:
            ValueError: the reply is malformed.
        """
        if not isinstance(reply, Sequence) or len(reply) > MAX_RANGES:
            raise ValueError(f"the slot map is not a list of at most {MAX_RANGES} ranges")
        ranges: list[tuple[int, int, Address]] = []
        for entry in reply:
            if not isinstance(entry, Sequence) or len(entry) < 3 or not isinstance(entry[2], Sequence):
                raise ValueError("a range of the slot map is not a list of start, end and server")
            start, end, node = entry[0], entry[1], entry[2]
            if not (isinstance(start, int) and isinstance(end, int) and 0 <= start <= end < NUM_SLOTS):
                raise ValueError(f"a range of the slot map is not within 0 to {NUM_SLOTS - 1}")
            if len(node) < 2 or not isinstance(node[1], int) or not 0 < node[1] < 65536:
                raise ValueError("a range of the slot map has no server with a port from 1 to 65535")
            host = node[0].decode("ascii", "replace") if isinstance(node[0], bytes) else ""
            ranges.append((start, end, (host.strip("?") or server[0], node[1])))
        ranges.sort()
        self._starts = [start for start, _, _ in ranges]
        self._ends = [end for _, end, _ in ranges]
        self._addresses = [address for _, _, address in ranges]
        self._moved.clear()

    def note(self, redirection: Redirection) -> None:
        """Record that a slot has moved to the address in a redirection."""
        self._moved[redirection.slot] = redirection.address

    def find(self, slot: int) -> Address | None:
        """Return the address of the server that has the slot; `None` if unknown.

        Args:
            slot: number of the slot, from 0 to 16383.
        """
        if slot in self._moved:
            return self._moved[slot]
        i = bisect_right(self._starts, slot) - 1
        return self._addresses[i] if i >= 0 and slot <= self._ends[i] else None

    @property
    def addresses(self) -> set[Address]:
        """Addresses of all known servers."""
        return {*self._addresses, *self._moved.values()}
