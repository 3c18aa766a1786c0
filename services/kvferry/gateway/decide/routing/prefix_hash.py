"""Routing by cached prefix and rendezvous hashing, within a bound on the replica's load.

Replicas are ranked by the cached tokens of the prompt, as predicted by `gateway.decide.cache_map`. Among replicas that
tie, and if no replica has enough of the prompt, equal prefixes go to the same replica: rendezvous hashing (Thaler and
Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM ToN 1998) orders the replicas for a prefix. A
request takes the first replica whose load stays within ceil(c * (total + 1) / n), the bound of Mirrokni, Thorup and
Zadimoghaddam, "Consistent hashing with bounded loads", SODA 2018. Removing a replica moves only its own requests, and
one popular prefix cannot overload a replica.
"""

import math
from collections.abc import Sequence

from kvferry.gateway.decide.routing.routes import (
    MAX_RANKED,
    Candidate,
    Pick,
    Replica,
    RouteRequest,
    Work,
    readers,
)


class PrefixHash:
    """The policy `prefix-hash`. Deterministic; the order of the replicas does not matter."""

    def __init__(self, load_factor: float) -> None:
        """
        Args:
            load_factor: c of the load bound, at least 1.
        """
        self._load_factor = load_factor

    def one(self, request: RouteRequest, replicas: Sequence[Replica], work: Work = Work.WHOLE) -> Pick | None:
        """Choose by rank within the load bound; see `Policy.one`."""
        if not replicas:
            return None
        candidates = (Candidate(one, request.cached(one), request.weight(one)) for one in replicas)
        ranked = sorted(candidates, key=rank, reverse=True)
        total = sum(replica.load for replica in replicas)
        capacity = math.ceil(self._load_factor * (total + 1) / len(replicas))
        # At least one replica is below capacity: otherwise the loads would sum to n * capacity > total.
        chosen = next(candidate for candidate in ranked if candidate.replica.load < capacity)
        preferred = ranked[0].replica.worker_id
        return Pick(chosen.replica, preferred, capacity, len(replicas), chosen.cached, tuple(ranked[:MAX_RANKED]))

    def pair(
        self, request: RouteRequest, prefill: Sequence[Replica], decode: Sequence[Replica]
    ) -> tuple[Pick, Pick] | None:
        """Choose the prefill replica first, then one that reads its blocks; see `Policy.pair`."""
        first = self.one(request, prefill, Work.PROMPT)
        if first is None:
            return None
        second = self.one(request, readers(decode, first.replica.fingerprint, first.replica.family), Work.GENERATE)
        assert second is not None  # only prefill workers whose blocks a decode worker can read are candidates
        return first, second


def rank(candidate: Candidate) -> tuple[int, int, bytes, str]:
    """Return the sort key of a candidate by cached prefix; the highest is preferred."""
    cached = candidate.cached
    return (
        cached.tokens if cached.decides else 0,
        cached.confirmed_tokens if cached.decides else 0,
        candidate.weight,
        candidate.replica.address,
    )
