"""Routing decisions in the form recorded in the journal."""

from dataclasses import dataclass

from kvferry.gateway.routing.replica_choice import Pick, Route, RouteReason


@dataclass(frozen=True, slots=True)
class RouteNote:
    """A routing decision."""

    reason: str
    role: str
    worker: str
    preferred: str
    """Name of the replica that rendezvous hashing ranks first for the prefix."""
    load: int
    """Load of the chosen replica."""
    capacity: int
    """Upper bound on a replica's load; a preferred replica at the bound is skipped."""
    num_candidates: int


def route_notes(route: Route) -> list[RouteNote]:
    """Convert a route to journal entries, one per worker."""
    picks: list[tuple[str, Pick]] = [("prefill" if route.reason is RouteReason.POOLING else "decode", route.decode)]
    if route.prefill is not None:
        picks.insert(0, ("prefill", route.prefill))
    return [
        RouteNote(
            reason=route.reason.value,
            role=role,
            worker=pick.replica.worker_id,
            preferred=pick.preferred,
            load=pick.replica.load,
            capacity=pick.capacity,
            num_candidates=pick.num_candidates,
        )
        for role, pick in picks
    ]
