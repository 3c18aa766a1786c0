"""Routes, the choices they consist of, and the interface of the policies that make them."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from blake3 import blake3

from kvferry.core.ids import WorkerId
from kvferry.gateway.decide.routing.replicas import CachedPrefix, CachedTokens, PrefixKey, Replica, nothing_cached

MAX_RANKED = 8
"""Number of candidates that a decision keeps for its explanation."""


class Work(StrEnum):
    """Part of a request for which a worker is chosen."""

    PROMPT = "prompt"
    """Compute the prompt."""
    GENERATE = "generate"
    """Generate, with the prompt's KV from a prefill worker."""
    WHOLE = "whole"
    """Compute the prompt and generate."""


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """Properties of a request on which the choice of its route depends."""

    key: PrefixKey
    cached: CachedTokens = nothing_cached
    num_tokens: int = 1
    """Number of tokens of the prompt and of the output so far."""
    max_output_tokens: int = 0
    """Maximum number of further tokens; 0 if unknown."""
    source: Replica | None = None
    """Worker that offers the prompt's KV; `None` until it is computed."""


class Terms(NamedTuple):
    """Estimated latency of a request on a worker, in seconds, by term."""

    queue: float = 0.0
    """Computation of the prompts ahead of it."""
    prefill: float = 0.0
    """Computation of the uncached part of its prompt."""
    transfer: float = 0.0
    """Hand-off of the part of its KV that the worker lacks."""
    decode: float = 0.0
    """Generation, alongside the sequences on the worker."""
    room: float = 0.0
    """Wait for KV blocks in use by other sequences."""
    eviction: float = 0.0
    """Expected recomputation of the cached blocks that it evicts."""

    @property
    def total(self) -> float:
        """Sum of all terms."""
        return sum(self)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica with the values that determine its rank."""

    replica: Replica
    cached: CachedPrefix
    weight: bytes
    """Rendezvous weight for the prefix."""
    terms: Terms | None = None
    """Estimated latency; `None` with policies that do not estimate."""


@dataclass(frozen=True, slots=True)
class Pick:
    """The chosen replica and the inputs of the choice."""

    replica: Replica
    preferred: WorkerId
    """Name of the replica ranked first for the prefix: the one that has most of it cached, or that it hashes to."""
    capacity: int
    """Upper bound on a replica's load, in requests; 0 if the policy has none."""
    num_candidates: int
    cached: CachedPrefix = CachedPrefix()  # noqa: RUF009  frozen
    """The prompt's cached prefix on the replica."""
    ranked: tuple[Candidate, ...] = ()
    """The candidates that rank highest, in order."""
    terms: Terms | None = None
    """Estimated latency on the replica; `None` with policies that do not estimate."""

    @property
    def spilled(self) -> bool:
        """Whether a different replica than the preferred one was chosen, because of load."""
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
    """The decode worker has enough of the prompt in its cache to compute the rest."""
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

    @property
    def seconds(self) -> float:
        """Estimated latency of the request in seconds; 0 with policies that do not estimate."""
        picks = (self.decode,) if self.prefill is None else (self.prefill, self.decode)
        return sum(pick.terms.total for pick in picks if pick.terms is not None)


class Policy(Protocol):
    """Chooses replicas for requests; used by one gateway."""

    def one(self, request: RouteRequest, replicas: Sequence[Replica], work: Work) -> Pick | None:
        """Choose the replica for a part of a request; `None` if `replicas` is empty.

        Args:
            request: properties of the request.
            replicas: workers of which one is chosen.
            work: the part of the request that the worker computes.
        """
        ...

    def pair(
        self, request: RouteRequest, prefill: Sequence[Replica], decode: Sequence[Replica]
    ) -> tuple[Pick, Pick] | None:
        """Choose a prefill replica and a decode replica that reads its blocks.

        Args:
            request: the request.
            prefill: replicas whose blocks at least one of `decode` can read, all with equal layouts or all by
                conversion; `None` is returned if there are none.
            decode: replicas that can generate.
        """
        ...


def rendezvous_weight(key: bytes, worker_id: WorkerId) -> bytes:
    """Return the weight of a replica for a prefix; the highest is preferred (Thaler and Ravishankar, "Using name-based
    mappings to increase hit rates", IEEE/ACM ToN 1998).

    Args:
        key: key of the prefix.
        worker_id: id of the replica's worker.
    """
    return blake3(key + worker_id.encode()).digest(8)
