"""Chooses the replicas for a request: equal prefixes go to the same replica, within a bound on its load.

Rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM ToN 1998)
orders the replicas for a prefix; a request takes the first whose load stays within
ceil(c * (total + 1) / n), the bound of Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded
loads", SODA 2018. Removing a replica moves only its own requests, and one popular prefix cannot overload a replica.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from blake3 import blake3

from kvferry.core.ids import WorkerId


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


PrefixKey = Callable[[Replica], bytes]
"""Function from a replica to the request's routing key in its layout; see `prompt_names.prefix_key`."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """All replicas that accept requests, by role."""

    prefill: tuple[Replica, ...] = ()
    decode: tuple[Replica, ...] = ()
    both: tuple[Replica, ...] = ()


@dataclass(frozen=True, slots=True)
class Pick:
    """The chosen replica and the inputs of the choice."""

    replica: Replica
    preferred: WorkerId
    """Name of the replica that rendezvous hashing ranks first for the prefix."""
    capacity: int
    """Upper bound on a replica's load, in requests."""
    num_candidates: int

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


def pick(key: PrefixKey, replicas: Sequence[Replica], load_factor: float) -> Pick | None:
    """Choose the replica for `key`; `None` if `replicas` is empty.

    Deterministic; the order of `replicas` does not matter.
    """
    if not replicas:
        return None
    ranked = sorted(
        replicas, key=lambda replica: (_weight(key(replica), replica.worker_id), replica.address), reverse=True
    )
    total = sum(replica.load for replica in replicas)
    capacity = math.ceil(load_factor * (total + 1) / len(replicas))
    # At least one replica is below capacity: otherwise the loads would sum to n * capacity > total.
    chosen = next(replica for replica in ranked if replica.load < capacity)
    return Pick(chosen, ranked[0].worker_id, capacity, len(replicas))


def choose(
    key: PrefixKey, candidates: Candidates, *, load_factor: float, skip_prefill: RouteReason | None = None
) -> Route | None:
    """Choose the route of a request; `None` if no replica can serve it.

    Args:
        key: the request's prefix key.
        candidates: replicas that accept requests.
        load_factor: c of the load bound; greater than 1.
        skip_prefill: reason why no prefill worker is needed; `None` if a prefill worker is needed.
    """
    if skip_prefill is not None:
        alone = pick(key, candidates.decode, load_factor) or pick(key, candidates.both, load_factor)
        return None if alone is None else Route(None, alone, skip_prefill)
    decodable = {replica.fingerprint for replica in candidates.decode}
    prefill = pick(key, [p for p in candidates.prefill if p.fingerprint in decodable], load_factor)
    if prefill is None:
        convertible = [p for p in candidates.prefill if readers(candidates.decode, p.fingerprint, p.family)]
        prefill = pick(key, convertible, load_factor)
    if prefill is not None:
        partner = prefill.replica
        decode = pick(key, readers(candidates.decode, partner.fingerprint, partner.family), load_factor)
        assert decode is not None  # only prefill workers whose blocks a decode worker can read were candidates
        equal = decode.replica.fingerprint == partner.fingerprint
        return Route(prefill, decode, RouteReason.PAIR if equal else RouteReason.CONVERTED)
    whole = pick(key, candidates.both, load_factor)
    if whole is not None:
        return Route(None, whole, RouteReason.BOTH)
    alone = pick(key, candidates.decode, load_factor)
    return None if alone is None else Route(None, alone, RouteReason.NO_PREFILL)


def choose_pooling(key: PrefixKey, candidates: Candidates, *, load_factor: float) -> Route | None:
    """Choose the worker that computes a vector: one that computes prompts; `None` if there is none. Workers of role
    `both` are used only without prefill workers, as for generation."""
    found = pick(key, candidates.prefill, load_factor) or pick(key, candidates.both, load_factor)
    return None if found is None else Route(None, found, RouteReason.POOLING)


def readers(decode: Sequence[Replica], fingerprint: bytes, family: bytes) -> tuple[Replica, ...]:
    """Return the replicas that can read blocks with this fingerprint; if there are none, replicas of this family, which
    convert the blocks."""
    equal = tuple(replica for replica in decode if replica.fingerprint == fingerprint)
    return equal or tuple(replica for replica in decode if family and replica.family == family)


def _weight(key: bytes, worker_id: WorkerId) -> bytes:
    return blake3(key + worker_id.encode()).digest(8)
