"""Chooses the replicas for a request: where most of its prompt is cached, within a bound on the replica's load.

Replicas are ranked by the cached tokens of the prompt, as far as the gateway knows them (`gateway.cache_map`). Among
equals, and if no replica has enough of the prompt, equal prefixes go to the same replica: rendezvous hashing (Thaler
and Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM ToN 1998) orders the replicas for a prefix.
A request takes the first replica whose load stays within ceil(c * (total + 1) / n), the bound of Mirrokni, Thorup and
Zadimoghaddam, "Consistent hashing with bounded loads", SODA 2018. Removing a replica moves only its own requests, and
one popular prefix cannot overload a replica.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from blake3 import blake3

from kvferry.core.ids import AdapterId, WorkerId
from kvferry.gateway.cache_map.cache_map import Basis
from kvferry.gateway.cache_map.map_states import MapState

_MAX_RANKED = 8
"""Number of candidates that a decision keeps for its explanation."""


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
    """Versions of adapters that requests may begin with."""
    retired_adapters: frozenset[AdapterId] = frozenset()
    """Versions that only requests which have begun with them may use."""


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The part of a prompt that a replica is predicted to have in its cache."""

    tokens: int = 0
    confirmed_tokens: int = 0
    """Number of tokens that the replica itself has reported; at most `tokens`."""
    decides: bool = False
    """Whether the prefix is long enough to prefer the replica over others with less."""
    state: MapState = MapState.BLIND
    """State of the replica's map."""
    basis: Basis = Basis.HISTORY


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica with the terms of its rank."""

    replica: Replica
    cached: CachedPrefix
    weight: bytes
    """Rendezvous weight for the prefix."""

    @property
    def rank(self) -> tuple[int, int, bytes, str]:
        """Sort key; the highest is preferred."""
        decides = self.cached.decides
        return (
            self.cached.tokens if decides else 0,
            self.cached.confirmed_tokens if decides else 0,
            self.weight,
            self.replica.address,
        )


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
    """Return the adapters that requests may name, by name: of the versions of one name, the one that most workers that
    generate have."""
    counts = Counter(adapter for replica in (*candidates.decode, *candidates.both) for adapter in replica.adapters)
    best: dict[str, AdapterId] = {}
    for adapter in sorted(counts, key=lambda one: (counts[one], one.digest)):
        best[adapter.name] = adapter
    return tuple(best[name] for name in sorted(best))


@dataclass(frozen=True, slots=True)
class Pick:
    """The chosen replica and the inputs of the choice."""

    replica: Replica
    preferred: WorkerId
    """Name of the replica that ranks first."""
    capacity: int
    """Upper bound on a replica's load, in requests."""
    num_candidates: int
    cached: CachedPrefix = CachedPrefix()
    """The prompt's cached prefix on the replica."""
    ranked: tuple[Candidate, ...] = ()
    """The candidates that rank highest, in order."""

    @property
    def spilled(self) -> bool:
        """Whether the preferred replica was at its load bound, so that a different replica was chosen."""
        return self.replica.worker_id != self.preferred


class RouteReason(StrEnum):
    """Reason why a route has these workers."""

    PAIR = "pair"
    """A prefill and a decode worker with equal KV layouts."""
    CONVERTED = "converted"
    """A prefill and a decode worker of the same model with different KV layouts; the decode worker converts the
    blocks."""
    SHORT_PROMPT = "short_prompt"
    """The prompt is short enough for the decode worker to compute it."""
    SHORT_TAIL = "short_tail"
    """The decode worker has so much of the prompt in its cache that it computes the rest."""
    RESUME = "resume"
    """A resumed stream; only a decode worker is needed."""
    BOTH = "both"
    """No pair exists, not even with conversion; a worker of role `both` serves the whole request."""
    POOLING = "pooling"
    """A vector of the prompt is computed, by a prefill worker or one of role `both`."""
    NO_PREFILL = "no_prefill"
    """No pair and no worker of role `both` exist; the decode worker computes the prompt."""


@dataclass(frozen=True, slots=True)
class Route:
    """The workers that serve a request."""

    prefill: Pick | None
    """The prefill worker; `None` if the decode worker computes the prompt."""
    decode: Pick
    """The worker that generates; with reason `POOLING`, the one that computes the vector."""
    reason: RouteReason


def nothing_cached(_: Replica) -> CachedPrefix:
    """Return an empty prefix, for choices without knowledge of caches."""
    return CachedPrefix()


def pick(
    key: PrefixKey, replicas: Sequence[Replica], load_factor: float, cached: CachedTokens = nothing_cached
) -> Pick | None:
    """Choose the replica for `key`; `None` if `replicas` is empty.

    Deterministic; the order of `replicas` does not matter.
    """
    if not replicas:
        return None
    candidates = (Candidate(one, cached(one), _weight(key(one), one.worker_id)) for one in replicas)
    ranked = sorted(candidates, key=lambda candidate: candidate.rank, reverse=True)
    total = sum(replica.load for replica in replicas)
    capacity = math.ceil(load_factor * (total + 1) / len(replicas))
    # At least one replica is below capacity: otherwise the loads would sum to n * capacity > total.
    chosen = next(candidate for candidate in ranked if candidate.replica.load < capacity)
    preferred = ranked[0].replica.worker_id
    return Pick(chosen.replica, preferred, capacity, len(replicas), chosen.cached, tuple(ranked[:_MAX_RANKED]))


def choose(
    key: PrefixKey,
    candidates: Candidates,
    *,
    load_factor: float,
    skip_prefill: RouteReason | None = None,
    cached: CachedTokens = nothing_cached,
    enough_tokens: int | None = None,
) -> Route | None:
    """Choose the route of a request; `None` if no replica can serve it.

    Args:
        key: the request's prefix key.
        candidates: replicas that accept requests.
        load_factor: c of the load bound; greater than 1.
        skip_prefill: reason why no prefill worker is needed; `None` if a prefill worker is needed.
        cached: the prompt's cached prefix on each replica.
        enough_tokens: number of tokens which, if a decode worker has reported them as cached, make a prefill worker
            unnecessary; `None` if a prefill worker is needed in any case.
    """

    def best(replicas: Sequence[Replica]) -> Pick | None:
        return pick(key, replicas, load_factor, cached)

    if skip_prefill is not None:
        alone = best(candidates.decode) or best(candidates.both)
        return None if alone is None else Route(None, alone, skip_prefill)
    if enough_tokens is not None:
        warm = best(candidates.decode)
        if warm is not None and warm.cached.confirmed_tokens >= enough_tokens:
            return Route(None, warm, RouteReason.SHORT_TAIL)
    decodable = {replica.fingerprint for replica in candidates.decode}
    prefill = best([p for p in candidates.prefill if p.fingerprint in decodable])
    if prefill is None:
        convertible = [p for p in candidates.prefill if readers(candidates.decode, p.fingerprint, p.family)]
        prefill = best(convertible)
    if prefill is not None:
        partner = prefill.replica
        decode = best(readers(candidates.decode, partner.fingerprint, partner.family))
        assert decode is not None  # only prefill workers whose blocks a decode worker can read were candidates
        equal = decode.replica.fingerprint == partner.fingerprint
        return Route(prefill, decode, RouteReason.PAIR if equal else RouteReason.CONVERTED)
    whole = best(candidates.both)
    if whole is not None:
        return Route(None, whole, RouteReason.BOTH)
    alone = best(candidates.decode)
    return None if alone is None else Route(None, alone, RouteReason.NO_PREFILL)


def choose_pooling(
    key: PrefixKey, candidates: Candidates, *, load_factor: float, cached: CachedTokens = nothing_cached
) -> Route | None:
    """Choose the worker that computes a vector: one that computes prompts; `None` if there is none. Workers of role
    `both` are used only without prefill workers, as for generation."""
    found = pick(key, candidates.prefill, load_factor, cached) or pick(key, candidates.both, load_factor, cached)
    return None if found is None else Route(None, found, RouteReason.POOLING)


def readers(decode: Sequence[Replica], fingerprint: bytes, family: bytes) -> tuple[Replica, ...]:
    """Return the replicas that can read blocks with this fingerprint; if there are none, replicas of this family, which
    convert the blocks."""
    equal = tuple(replica for replica in decode if replica.fingerprint == fingerprint)
    return equal or tuple(replica for replica in decode if family and replica.family == family)


def _weight(key: bytes, worker_id: WorkerId) -> bytes:
    return blake3(key + worker_id.encode()).digest(8)
