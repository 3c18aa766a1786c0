"""Workers as candidates, routes, the interface of the policies that choose them, and the choice of a request's workers.

A route is chosen in two steps: first the roles that the request needs, then the replicas by a policy.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from blake3 import blake3

from kvferry.core.ids import AdapterId, WorkerId
from kvferry.gateway.decide.cache_map.cache_map import Basis
from kvferry.gateway.decide.cache_map.map_states import MapState

MAX_RANKED = 8
"""Number of candidates that a decision keeps for its explanation."""


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
class PredictedPrefix:
    """The part of a prompt that a replica is predicted to have in its cache."""

    tokens: int = 0
    confirmed_tokens: int = 0
    """Number of tokens that the replica itself has reported; at most `tokens`."""
    decides: bool = False
    """Whether the prefix is long enough to prefer the replica over others with a shorter one."""
    state: MapState = MapState.BLIND
    """State of the replica's map."""
    basis: Basis = Basis.HISTORY


CachedTokens = Callable[[Replica], PredictedPrefix]
"""Function from a replica to the prompt's cached prefix; see `cached_prefix.PromptCaches`."""

PrefixKey = Callable[[Replica], bytes]
"""Function from a replica to the request's routing key in its layout; see `cached_prefix.prefix_key`."""


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


def nothing_cached(_: Replica) -> PredictedPrefix:
    """Return an empty prefix, for choices without cache predictions."""
    return PredictedPrefix()


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
    order: Callable[[Replica], bytes] | None = None
    """Weight of a replica for the prompt, where another order than rendezvous hashing of the key decides ties."""

    def weight(self, replica: Replica) -> bytes:
        """Return the weight of a replica for the prompt; of replicas that tie, the highest is preferred."""
        if self.order is not None:
            return self.order(replica)
        return rendezvous_weight(self.key(replica), replica.worker_id)


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
    cached: PredictedPrefix
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
    cached: PredictedPrefix = PredictedPrefix()
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


class RoutingPolicy(Protocol):
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


class Layout(NamedTuple):
    """Layout of KV blocks, by which their readers are found."""

    fingerprint: bytes
    """Workers with the same fingerprint read the blocks without conversion."""
    family: bytes = b""
    """Workers of the same family can convert them; empty if conversion is not possible."""


@dataclass(frozen=True, slots=True)
class SampleProgress:
    """Progress of a sample, on which the roles that it needs depend."""

    num_prompt: int
    """Number of tokens of its prompt."""
    has_output: bool = False
    """Whether it has emitted tokens, and continues after a lost worker."""
    offered: Layout | None = None
    """Layout of the blocks that a prefill worker offers for it; `None` without an offer."""


def choose_route(
    request: RouteRequest,
    candidates: Candidates,
    policy: RoutingPolicy,
    progress: SampleProgress,
    *,
    skip_prefill_below: int,
) -> Route | None:
    """Choose the route of a sample's next attempt; `None` if no replica can serve it.

    Args:
        request: the request.
        candidates: replicas that accept requests.
        policy: chooses among the replicas of a role.
        progress: progress of the sample.
        skip_prefill_below: number of uncached prompt tokens below which a decode worker computes them itself; 0 always
            uses a prefill worker.
    """
    offered = progress.offered
    if offered is not None:
        fitting = readers(candidates.decode, offered.fingerprint, offered.family)
        is_equal = not fitting or fitting[0].fingerprint == offered.fingerprint
        reason = RouteReason.PAIR if is_equal else RouteReason.CONVERTED
        return choose(request, Candidates(decode=fitting), policy, skip_prefill=reason)
    if progress.has_output:
        return choose(request, candidates, policy, skip_prefill=RouteReason.RESUME)
    if progress.num_prompt < skip_prefill_below:
        return choose(request, candidates, policy, skip_prefill=RouteReason.SHORT_PROMPT)
    enough = progress.num_prompt - skip_prefill_below + 1 if skip_prefill_below else None
    return choose(request, candidates, policy, enough_tokens=enough)


def choose(
    request: RouteRequest,
    candidates: Candidates,
    policy: RoutingPolicy,
    *,
    skip_prefill: RouteReason | None = None,
    enough_tokens: int | None = None,
) -> Route | None:
    """Choose the route of a request; `None` if no replica can serve it.

    Args:
        request: the request.
        candidates: replicas that accept requests.
        policy: chooses among the replicas of a role.
        skip_prefill: reason why no prefill worker is needed; `None` if a prefill worker is needed.
        enough_tokens: minimum number of cached tokens, as reported by a decode worker, with which it needs no prefill
            worker; `None` if a prefill worker is always needed.
    """
    if skip_prefill is not None:
        work = Work.WHOLE if request.source is None else Work.GENERATE
        alone = policy.one(request, candidates.decode, work) or policy.one(request, candidates.both, work)
        return None if alone is None else Route(None, alone, skip_prefill)
    pair = _pair(request, candidates, policy)
    if enough_tokens is not None:
        warm = policy.one(request, candidates.decode, Work.WHOLE)
        if warm is not None and warm.cached.confirmed_tokens >= enough_tokens:
            tail = Route(None, warm, RouteReason.SHORT_TAIL)
            if pair is None or tail.seconds <= pair.seconds:
                return tail
    if pair is not None:
        return pair
    whole = policy.one(request, candidates.both, Work.WHOLE)
    if whole is not None:
        return Route(None, whole, RouteReason.BOTH)
    alone = policy.one(request, candidates.decode, Work.WHOLE)
    return None if alone is None else Route(None, alone, RouteReason.NO_PREFILL)


def choose_pooling(request: RouteRequest, candidates: Candidates, policy: RoutingPolicy) -> Route | None:
    """Choose the worker that computes a vector: one that computes prompts; `None` if there is none. Workers of role
    `both` are used only without prefill workers, as for generation.

    Args:
        request: properties of the request.
        candidates: workers that accept requests.
        policy: policy that ranks the workers.
    """
    found = policy.one(request, candidates.prefill, Work.PROMPT) or policy.one(request, candidates.both, Work.PROMPT)
    return None if found is None else Route(None, found, RouteReason.POOLING)


def _pair(request: RouteRequest, candidates: Candidates, policy: RoutingPolicy) -> Route | None:
    """Choose a pair with equal layouts or, if there is none, a pair that converts blocks."""
    decodable = {replica.fingerprint for replica in candidates.decode}
    prefill = [p for p in candidates.prefill if p.fingerprint in decodable]
    if not prefill:
        prefill = [p for p in candidates.prefill if readers(candidates.decode, p.fingerprint, p.family)]
    found = policy.pair(request, prefill, candidates.decode)
    if found is None:
        return None
    first, second = found
    equal = first.replica.fingerprint == second.replica.fingerprint
    return Route(first, second, RouteReason.PAIR if equal else RouteReason.CONVERTED)
