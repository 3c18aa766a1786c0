"""Which endpoints have which prefixes cached, by the requests that they were sent. No I/O.

Model servers of others do not report their caches. Each endpoint is assumed to keep the chunks that it was sent last,
as many as its KV memory holds; a restart, which its metrics show, empties it. The index is the one of the gateway's
cache map: one lookup finds the cached prefix of a prompt on all endpoints.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvferry.gateway.decide.cache_map.block_index import BlockIndex

MAX_ENDPOINTS = 4096
DEFAULT_CHUNKS = 16_384
"""Chunks that an endpoint of unknown memory is assumed to keep: about a million tokens."""
_MIN_CHUNKS = 256
_MAX_CHUNKS = 1 << 18
_MAX_TOTAL = 1 << 21
"""Chunks over all endpoints; about 150 bytes each."""


class PrefixHistory:
    """The prefixes of the endpoints, which are identified by their addresses. Not thread-safe."""

    def __init__(self, max_total: int = _MAX_TOTAL) -> None:
        """
        Args:
            max_total: maximum number of chunks over all endpoints, which share it equally.
        """
        self._index = BlockIndex(MAX_ENDPOINTS)
        self._max_total = max_total
        self._kept: dict[str, OrderedDict[int, None]] = {}
        self._bits: dict[str, int] = {}
        self._by_bit: dict[int, str] = {}
        self._limits: dict[str, int] = {}

    def limit(self, address: str, num_chunks: int) -> None:
        """Set the number of chunks that an endpoint's KV memory holds; 0 if it is unknown."""
        self._limits[address] = min(max(num_chunks, _MIN_CHUNKS), _MAX_CHUNKS) if num_chunks > 0 else DEFAULT_CHUNKS

    def sent(self, address: str, names: Sequence[int]) -> None:
        """Note that a prompt was sent to an endpoint.

        Args:
            address: address of the endpoint.
            names: names of the prompt's chunks, in order.
        """
        bit = self._bit(address)
        if not names or not bit:
            return
        kept = self._kept[address]
        added = [name for name in dict.fromkeys(names) if name not in kept]
        self._index.add(added, bit)
        # The end of a prompt is dropped first, since no prompt can use it without the beginning.
        for name in reversed(names):
            kept[name] = None
            kept.move_to_end(name)
        limit = min(self._limits.get(address, DEFAULT_CHUNKS), max(_MIN_CHUNKS, self._max_total // len(self._kept)))
        dropped = [kept.popitem(last=False)[0] for _ in range(len(kept) - limit)]
        self._index.remove(dropped, bit)

    def cached(self, names: Sequence[int]) -> dict[str, int]:
        """Return the number of leading chunks of a prompt that each endpoint has, without those that have none."""
        if not names:
            return {}
        found = self._index.prefix_blocks(names, self._index.exact)
        return {self._by_bit[bit]: depth for bit, depth in found.items()}

    def forget(self, address: str) -> None:
        """Drop what an endpoint had, after its restart or removal."""
        bit, kept = self._bits.pop(address, 0), self._kept.pop(address, None)
        self._limits.pop(address, None)
        if bit and kept is not None:
            del self._by_bit[bit]
            self._index.remove(list(kept), bit)
            self._index.return_slot(bit)

    def num_chunks(self, address: str) -> int:
        """Return the number of chunks that an endpoint is assumed to have."""
        return len(self._kept.get(address, ()))

    def _bit(self, address: str) -> int:
        bit = self._bits.get(address, 0)
        if not bit:
            bit = self._index.take_slot() or 0
            if bit:
                self._bits[address], self._by_bit[bit] = bit, address
                self._kept[address] = OrderedDict()
                self._index.exact |= bit
        return bit
