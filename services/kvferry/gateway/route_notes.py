"""Routing decisions as they are told afterwards."""

from dataclasses import dataclass

from kvferry.gateway.routing import Pick, Route


@dataclass(frozen=True, slots=True)
class RouteNote:
    """One routing decision."""

    reason: str
    role: str
    worker: str
    preferred: str
    """Whom the prefix belongs to."""
    load: int
    """Requests that the chosen one held."""
    capacity: int
    """What none might exceed; a preferred worker at this load is passed over."""
    num_candidates: int


def route_notes(route: Route) -> list[RouteNote]:
    """A route in words for the journal."""
    picks: list[tuple[str, Pick]] = [("decode", route.decode)]
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
