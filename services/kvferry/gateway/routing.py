"""Which replicas serve a request: the same prefix to the same place, never far above the average load.

Rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM ToN 1998)
orders the replicas for a prefix; a request takes the first whose load stays within
ceil(c * (total + 1) / n), the bound of Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded
loads", SODA 2018. Removing a replica moves only its own requests, and one popular prefix cannot drown a replica.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from blake3 import blake3

from kvferry.core.hashing import BlockNamer
from kvferry.core.ids import WorkerId


@dataclass(frozen=True, slots=True)
class Replica:
    """One worker that takes requests now."""

    address: str
    """How it is reached; unique."""
    worker_id: WorkerId
    """Its stable name, which the hash uses, so that a restart on another address keeps its prefixes."""
    fingerprint: bytes
    """Of its KV layout, its connector and where that reaches; equal ones exchange blocks byte for byte."""
    load: int
    """Requests it holds."""
    family: bytes = b""
    """Likewise of what no conversion changes: where these are equal, blocks are exchanged converted. Empty: unknown."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Everybody who takes requests now, by role."""

    prefill: tuple[Replica, ...] = ()
    decode: tuple[Replica, ...] = ()
    both: tuple[Replica, ...] = ()


@dataclass(frozen=True, slots=True)
class Pick:
    """One replica, and why this one."""

    replica: Replica
    preferred: WorkerId
    """Whom the prefix belongs to."""
    capacity: int
    """The load that no replica might exceed."""
    num_candidates: int

    @property
    def spilled(self) -> bool:
        """Whether load moved the request away from its prefix's own replica."""
        return self.replica.worker_id != self.preferred


class RouteReason(StrEnum):
    """Why the route has the shape that it has."""

    PAIR = "pair"
    """A prefill and a decode worker with equal layouts."""
    CONVERTED = "converted"
    """No such pair; these two have one model, and the decode worker converts the other's blocks."""
    SHORT_PROMPT = "short_prompt"
    """The decode worker computes so short a prompt faster itself."""
    RESUME = "resume"
    """The stream has begun; only a decode worker is needed."""
    AGGREGATED = "aggregated"
    """No pair exists, not even one that converts; a worker of role `both` does it all."""
    NO_PREFILL = "no_prefill"
    """No pair and nobody of role `both`: the decode worker computes the prompt."""


@dataclass(frozen=True, slots=True)
class Route:
    """Who serves a request."""

    prefill: Pick | None
    """`None`: the decode worker computes the prompt."""
    decode: Pick
    reason: RouteReason


def prefix_key(token_ids: Sequence[int], *, tenant: str, block_tokens: int, prefix_blocks: int) -> bytes:
    """The name that a request is spread by: that of its `prefix_blocks`-th leading full block, of its last full
    block when it has fewer, of all its tokens when it has none. At least one token."""
    tenant_key = tenant.encode()
    if len(token_ids) < block_tokens:
        short = BlockNamer(tenant=tenant_key, fingerprint=b"", block_tokens=len(token_ids))
        return short.name(None, token_ids)
    namer = BlockNamer(tenant=tenant_key, fingerprint=b"", block_tokens=block_tokens)
    return namer.chain(token_ids[: prefix_blocks * block_tokens])[-1]


def pick(key: bytes, replicas: Sequence[Replica], load_factor: float) -> Pick | None:
    """The replica for `key`; `None` when there is none to pick from.

    Deterministic; the order of `replicas` does not matter.
    """
    if not replicas:
        return None
    ranked = sorted(replicas, key=lambda replica: (_weight(key, replica.worker_id), replica.address), reverse=True)
    total = sum(replica.load for replica in replicas)
    capacity = math.ceil(load_factor * (total + 1) / len(replicas))
    # Not all can be full: their loads would add up to n * capacity > total.
    chosen = next(replica for replica in ranked if replica.load < capacity)
    return Pick(chosen, ranked[0].worker_id, capacity, len(replicas))


def choose(
    key: bytes, candidates: Candidates, *, load_factor: float, skip_prefill: RouteReason | None = None
) -> Route | None:
    """The route of a request, or `None` when nobody can serve it.

    Args:
        key: the request's `prefix_key`.
        candidates: who takes requests.
        load_factor: c of the bound; above 1.
        skip_prefill: why no prefill worker is wanted; `None`: one is.
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
        assert decode is not None  # there is a reader, or it would not have been picked
        equal = decode.replica.fingerprint == partner.fingerprint
        return Route(prefill, decode, RouteReason.PAIR if equal else RouteReason.CONVERTED)
    aggregated = pick(key, candidates.both, load_factor)
    if aggregated is not None:
        return Route(None, aggregated, RouteReason.AGGREGATED)
    alone = pick(key, candidates.decode, load_factor)
    return None if alone is None else Route(None, alone, RouteReason.NO_PREFILL)


def readers(decode: Sequence[Replica], fingerprint: bytes, family: bytes) -> tuple[Replica, ...]:
    """Who can use blocks from a worker with this fingerprint and family: those that need not convert them, if any."""
    equal = tuple(replica for replica in decode if replica.fingerprint == fingerprint)
    return equal or tuple(replica for replica in decode if family and replica.family == family)


def _weight(key: bytes, worker_id: WorkerId) -> bytes:
    return blake3(key + worker_id.encode()).digest(8)
