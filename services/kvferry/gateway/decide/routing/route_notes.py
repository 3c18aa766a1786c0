"""Routing decisions in the form recorded in the journal."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.gateway.decide.routing.policies import OtherChoice
from kvferry.gateway.decide.routing.routes import Candidate, Pick, Route, RouteReason


@dataclass(frozen=True, slots=True)
class CandidateNote:
    """A replica that was considered."""

    worker: str
    load: int
    cached_tokens: int
    """Number of the prompt's tokens that the replica was predicted to have."""
    confirmed_tokens: int
    """Number of those tokens that the replica itself had reported."""
    map_state: str
    """State of the replica's map: exact, catching_up or blind."""
    terms_ms: dict[str, float]
    """Estimated latency of the request on the replica, in milliseconds, by term: queue, prefill, transfer, decode,
    room, eviction; empty with policies that do not estimate."""
    basis: str
    """Basis of the prediction: exact (reported by the replica), pending (in part dispatched just before) or history
    (dispatched before; the cache is unknown)."""


@dataclass(frozen=True, slots=True)
class OtherNote:
    """The choice that another policy would have made."""

    policy: str
    prefill: str
    decode: str
    estimated_ms: float


@dataclass(frozen=True, slots=True)
class RouteNote:
    """A routing decision."""

    policy: str
    reason: str
    role: str
    worker: str
    preferred: str
    """Name of the replica ranked first for the prefix: by cached tokens, then by rendezvous hashing."""
    load: int
    """Load of the chosen replica."""
    capacity: int
    """Upper bound on a replica's load, with policy `prefix-hash`; 0 with the others."""
    num_candidates: int
    cached_tokens: int = 0
    """Number of the prompt's tokens that the chosen replica was predicted to have."""
    map_state: str = ""
    """State of the chosen replica's map."""
    candidates: tuple[CandidateNote, ...] = ()
    """The replicas that ranked highest, in order."""
    others: tuple[OtherNote, ...] = ()
    """Choices of the other policies; only in the note of a route's first worker."""


def route_notes(route: Route, policy: str, others: Sequence[OtherChoice] = ()) -> list[RouteNote]:
    """Convert a route to journal entries, one per worker.

    Args:
        route: the chosen route.
        policy: name of the policy that chose it.
        others: choices of other policies, which are added to the first entry.
    """
    picks: list[tuple[str, Pick]] = [("prefill" if route.reason is RouteReason.POOLING else "decode", route.decode)]
    if route.prefill is not None:
        picks.insert(0, ("prefill", route.prefill))
    return [
        RouteNote(
            policy=policy,
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
            others=() if number else tuple(map(_other_note, others)),
        )
        for number, (role, pick) in enumerate(picks)
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
        terms_ms={}
        if candidate.terms is None
        else {name: round(1e3 * seconds, 3) for name, seconds in candidate.terms._asdict().items()},
    )


def _other_note(other: OtherChoice) -> OtherNote:
    return OtherNote(other.policy, other.prefill, other.decode, round(1e3 * other.seconds, 3))
