"""The workers that accept requests, as candidates for routing."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.core.ids import AdapterId, WorkerId
from kvferry.gateway.decide.cache_map.cache_map import Basis
from kvferry.gateway.decide.cache_map.map_states import MapState


@dataclass(frozen=True, slots=True)
class Place:
    """Host and zone of a worker; empty where the cluster reports none."""

    node: str = ""
    zone: str = ""

    def distance(self, other: "Place") -> str:
        """Return the nearest known relation between two places: `node`, `zone`, `remote` or `unknown`."""
        if not (self.node and other.node):
            return "unknown"
        if self.node == other.node:
            return "node"
        return "zone" if self.zone and self.zone == other.zone else "remote"


@dataclass(frozen=True, slots=True)
class Replica:
    """A worker that accepts requests, as a candidate for routing."""

    address: str
    """`host:port` of the worker's gRPC server; unique in the fleet."""
    worker_id: WorkerId
    """The worker's stable name, an input of the rendezvous hash: a worker keeps its prefixes when it restarts at a new
    address."""
    fingerprint: bytes
    """Hash of KV layout, connector and domain; replicas with equal fingerprints exchange blocks without conversion."""
    load: int
    """Number of requests on the worker."""
    family: bytes = b""
    """Hash of model, heads, connector and domain; replicas with equal families can convert each other's blocks. Empty
    if unknown."""
    layout_fingerprint: bytes = b""
    """Fingerprint of only the KV layout; an input of the block hashes."""
    block_tokens: int = 16
    """Tokens per block in the worker's KV layout."""
    adapters: frozenset[AdapterId] = frozenset()
    """Adapter versions that new requests may use."""
    retired_adapters: frozenset[AdapterId] = frozenset()
    """Adapter versions that only requests already started with them may use."""
    tokens_to_compute: int = 0
    """Number of prompt tokens on the worker that are not computed yet, at its last status."""
    reported_at: float = 0.0
    """Time of that status in monotonic seconds; has no effect if there are no such tokens."""
    blocks_total: int = 0
    """Number of KV blocks; 0 if unknown."""
    blocks_free: int = 0
    """Number of KV blocks that are free or evictable."""
    blocks_cached: int = 0
    """Number of KV blocks in the prefix cache, in use or evictable."""
    place: Place = Place()


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The part of a prompt that a replica is predicted to have in its cache."""

    tokens: int = 0
    confirmed_tokens: int = 0
    """Number of tokens that the replica itself has reported; at most `tokens`."""
    decides: bool = False
    """Whether the prefix is long enough to prefer the replica over others with a shorter one."""
    state: MapState = MapState.BLIND
    """State of the replica's map."""
    basis: Basis = Basis.HISTORY


CachedTokens = Callable[[Replica], CachedPrefix]
"""Function from a replica to the prompt's cached prefix; see `cached_prefix.PromptCaches`."""

PrefixKey = Callable[[Replica], bytes]
"""Function from a replica to the request's routing key in its layout; see `prompt_names.prefix_key`."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """All replicas that accept requests, by role."""

    prefill: tuple[Replica, ...] = ()
    decode: tuple[Replica, ...] = ()
    both: tuple[Replica, ...] = ()


def with_adapter(candidates: Candidates, adapter: AdapterId | None) -> Candidates:
    """Return the replicas that have a version of an adapter; all for no adapter."""
    if adapter is None:
        return candidates

    def having(replicas: Sequence[Replica]) -> tuple[Replica, ...]:
        return tuple(replica for replica in replicas if adapter in replica.adapters | replica.retired_adapters)

    return Candidates(having(candidates.prefill), having(candidates.decode), having(candidates.both))


def served_adapters(candidates: Candidates) -> tuple[AdapterId, ...]:
    """Return the adapters that requests may name, by name: of several versions with one name, the version on most of
    the workers that generate."""
    counts = Counter(adapter for replica in (*candidates.decode, *candidates.both) for adapter in replica.adapters)
    best: dict[str, AdapterId] = {}
    for adapter in sorted(counts, key=lambda one: (counts[one], one.digest)):
        best[adapter.name] = adapter
    return tuple(best[name] for name in sorted(best))


def nothing_cached(_: Replica) -> CachedPrefix:
    """Return an empty prefix, for choices without cache predictions."""
    return CachedPrefix()


def readers(decode: Sequence[Replica], fingerprint: bytes, family: bytes) -> tuple[Replica, ...]:
    """Return the replicas that can read blocks with this fingerprint or, if there are none, replicas of this family,
    which convert the blocks.

    Args:
        decode: the decode workers.
        fingerprint: KV fingerprint of the prefill worker.
        family: its layout family; empty if its pages cannot be converted.
    """
    equal = tuple(replica for replica in decode if replica.fingerprint == fingerprint)
    return equal or tuple(replica for replica in decode if family and replica.family == family)
