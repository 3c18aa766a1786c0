"""Routing decisions in the form recorded in the journal."""

from dataclasses import dataclass

from kvferry.gateway.routing.replica_choice import Candidate, Pick, Route, RouteReason


@dataclass(frozen=True, slots=True)
class CandidateNote:
    """A replica that was considered."""

    worker: str
    load: int
    cached_tokens: int
    """Number of the prompt's tokens that the replica was predicted to have."""
    confirmed_tokens: int
    """Number of these that the replica itself had reported."""
    map_state: str
    """State of the replica's map: exact, catching_up or blind."""
    basis: str
    """Basis of the prediction: exact (reported by the replica), pending (in part dispatched just before) or history
    (dispatched before; the cache is unknown)."""


@dataclass(frozen=True, slots=True)
class RouteNote:
    """A routing decision."""

    reason: str
    role: str
    worker: str
    preferred: str
    """Name of the replica that ranks first: by cached tokens, then by rendezvous hashing of the prefix."""
    load: int
    """Load of the chosen replica."""
    capacity: int
    """Upper bound on a replica's load; a preferred replica at the bound is skipped."""
    num_candidates: int
    cached_tokens: int = 0
    """Number of the prompt's tokens that the chosen replica was predicted to have."""
    map_state: str = ""
    """State of the chosen replica's map."""
    candidates: tuple[CandidateNote, ...] = ()
    """The replicas that ranked highest, in order."""


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
            cached_tokens=pick.cached.tokens,
            map_state=pick.cached.state.value,
            candidates=tuple(map(_candidate_note, pick.ranked)),
        )
        for role, pick in picks
    ]


def _candidate_note(candidate: Candidate) -> CandidateNote:
    cached = candidate.cached
    return CandidateNote(
        worker=candidate.replica.worker_id,
        load=candidate.replica.load,
        cached_tokens=cached.tokens,
        confirmed_tokens=cached.confirmed_tokens,
        map_state=cached.state.value,
        basis=cached.basis.value,
    )
