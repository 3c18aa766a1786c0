"""Policies that ignore caches: in turn, by load, at random. They serve as baselines, and as alternatives when estimates
mislead."""

import random
from collections.abc import Callable, Sequence

from kvferry.gateway.decide.routing.routes import Pick, Replica, RouteRequest, Work, readers

Chooser = Callable[[Sequence[Replica]], Replica]
"""Function from replicas, at least one, sorted by name, to one of them."""


class PlainPolicy:
    """Chooses by one rule for every role."""

    def __init__(self, choose: Callable[[Work], Chooser]) -> None:
        """
        Args:
            choose: returns the rule for a part of a request; each part may have its own state.
        """
        self._choose = choose

    def one(self, request: RouteRequest, replicas: Sequence[Replica], work: Work) -> Pick | None:
        """Choose by the rule; see `Policy.one`."""
        if not replicas:
            return None
        chosen = self._choose(work)(sorted(replicas, key=lambda replica: replica.worker_id))
        return Pick(chosen, chosen.worker_id, 0, len(replicas), request.cached(chosen))

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


def round_robin() -> PlainPolicy:
    """Return a policy that takes the replicas in turn, separately for each part of a request."""
    turns: dict[Work, int] = {}

    def chooser(work: Work) -> Chooser:
        def choose(replicas: Sequence[Replica]) -> Replica:
            turn = turns[work] = turns.get(work, -1) + 1
            return replicas[turn % len(replicas)]

        return choose

    return PlainPolicy(chooser)


def least_loaded() -> PlainPolicy:
    """Return a policy that takes the replica with the fewest requests; of equals, the first by name."""

    def choose(replicas: Sequence[Replica]) -> Replica:
        return min(replicas, key=lambda replica: replica.load)

    return PlainPolicy(lambda _: choose)


def uniform(seed: int | None = None) -> PlainPolicy:
    """Return a policy that draws a replica uniformly at random.

    Args:
        seed: makes the draws repeatable; `None` seeds from the operating system.
    """
    draws = random.Random(seed)  # noqa: S311  a load balancer needs no secrecy

    return PlainPolicy(lambda _: draws.choice)
