"""A few endpoints of many, which the routing policy then compares: a pool may have thousands. No I/O.

Three sources: the endpoints with the longest cached prefixes; those that the prompt's beginning hashes to, the same in
each picker; and a few at random, so that several pickers with the same old pages do not all send to the one endpoint
that was idle (the power of two choices: Mitzenmacher, "How useful is old information?", IEEE TPDS 2000).
"""

from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from random import Random

from blake3 import blake3

_NUM_CACHED = 4
_NUM_HASHED = 2
_NUM_DRAWN = 4
_SMALL = 8
"""Size of a pool up to which all endpoints are compared."""
_POINTS = 16
"""Points of each endpoint on the ring."""
_HASHED, _OTHER = b"\x01", b"\x00"


class HashRing:
    """Consistent hashing of keys to names (Karger et al., STOC 1997). Immutable."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """
        Args:
            names: address by name; names decide the places on the ring.
        """
        points = sorted(
            (int.from_bytes(blake3(f"{name}\x00{number}".encode()).digest(8)), address)
            for name, address in names.items()
            for number in range(_POINTS)
        )
        self._keys = [key for key, _ in points]
        self._addresses = [address for _, address in points]

    def walk(self, key: bytes) -> Iterator[str]:
        """Yield addresses in the order of the ring from a key on; an address may be repeated."""
        start = bisect(self._keys, int.from_bytes(key))
        yield from self._addresses[start:]
        yield from self._addresses[:start]


@dataclass(frozen=True, slots=True)
class Eligible:
    """Endpoints that may serve a request."""

    order: tuple[str, ...] = ()
    """Addresses, in a fixed order."""
    members: frozenset[str] = frozenset()

    @classmethod
    def of(cls, addresses: Iterable[str]) -> "Eligible":
        """Return a group of these addresses."""
        order = tuple(addresses)
        return cls(order, frozenset(order))


def shortlist(
    eligible: Eligible, cached: Mapping[str, int], key: bytes, ring: HashRing, draws: Random
) -> dict[str, bytes]:
    """Return addresses to compare, each with its weight where they tie: the ring's order first, then at random.

    Args:
        eligible: endpoints that may serve the request.
        cached: number of cached chunks by address; without those that have none.
        key: hash of the prompt's beginning, 8 bytes.
        ring: ring of all endpoints, also those that are not eligible.
        draws: random numbers.
    """
    order, members = eligible.order, eligible.members
    chosen: dict[str, bytes] = {}
    wanted = min(_NUM_HASHED, len(order))
    for address in ring.walk(key):
        if len(chosen) >= wanted:
            break
        if address in members and address not in chosen:
            chosen[address] = _HASHED + bytes((_NUM_HASHED - len(chosen),))
    best = [(depth, address) for address, depth in cached.items() if address in members]
    for _, address in sorted(best, reverse=True)[:_NUM_CACHED]:
        chosen.setdefault(address, _OTHER + draws.randbytes(2))
    drawn = order if len(order) <= _SMALL else (order[draws.randrange(len(order))] for _ in range(_NUM_DRAWN))
    for address in drawn:
        chosen.setdefault(address, _OTHER + draws.randbytes(2))
    return chosen
