"""Workers of a simulated pool, as represented in the gateway: candidates for routing, statuses, and cache feeds."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from kvferry.core.ids import WorkerId
from kvferry.core.load import WorkerLoad
from kvferry.engine.schedule.blocks.prefix_index import CacheChange
from kvferry.gateway.decide.cache_map.cache_map import CacheMap
from kvferry.gateway.decide.cache_map.feed_events import CacheDelta, Digest, SnapshotPart, xor_of
from kvferry.gateway.decide.cache_map.map_states import MapState
from kvferry.gateway.decide.cache_map.replica_map import FeedBroken
from kvferry.gateway.decide.estimates.estimates import Process
from kvferry.gateway.decide.flow.capacity import WorkerRoom
from kvferry.gateway.decide.routing.routes import Candidates
from kvferry.gateway.decide.routing.routes import Replica as Candidate
from kvferry.simulator.clock import VirtualClock
from kvferry.simulator.worker.handoff import SimulatedLoader, SimulatedOfferDesk
from kvferry.simulator.worker.replica import SimulatedReplica

PREFILL, DECODE, BOTH = "prefill", "decode", "both"
ROLES = (PREFILL, DECODE, BOTH)
_LAYOUT = b"simulated layout"


@dataclass(slots=True, eq=False)
class SimulatedMember:
    """One incarnation of a worker."""

    name: str
    incarnation: str
    role: str
    replica: SimulatedReplica
    desk: SimulatedOfferDesk
    loader: SimulatedLoader
    candidate: Candidate
    in_flight: int = 0
    """Requests of the gateway on this worker."""
    reported: WorkerLoad = WorkerLoad()  # noqa: RUF009  frozen
    """Load in the worker's last status."""
    place: int = 0
    """Index among the workers of its role."""

    @property
    def process(self) -> Process:
        """Key of its estimates."""
        return Process(WorkerId(self.name), self.incarnation)

    @property
    def room(self) -> WorkerRoom:
        """The state of the worker, as its status reports it now."""
        replica = self.replica
        return WorkerRoom(
            self.role, replica.settings.limits.max_num_seqs, replica.num_jobs, self.in_flight, replica.kv_usage
        )


def candidate_of(name: str, block_tokens: int) -> Candidate:
    """Return an idle worker as a candidate for routing."""
    return Candidate(
        name, WorkerId(name), _LAYOUT, 0, family=_LAYOUT, layout_fingerprint=_LAYOUT, block_tokens=block_tokens
    )


class Members:
    """The workers that accept requests."""

    def __init__(self) -> None:
        self.by_name: dict[str, SimulatedMember] = {}
        self._by_role: dict[str, list[SimulatedMember]] = {role: [] for role in ROLES}
        self._candidates: dict[str, list[Candidate]] = {role: [] for role in ROLES}
        self._known: dict[str, tuple[Candidate, ...]] = dict.fromkeys(ROLES, ())

    def join(self, member: SimulatedMember) -> None:
        """Add a worker."""
        member.place = len(self._by_role[member.role])
        self.by_name[member.name] = member
        self._by_role[member.role].append(member)
        self._candidates[member.role].append(member.candidate)
        self._known[member.role] = ()

    def leave(self, member: SimulatedMember) -> None:
        """Remove a worker."""
        del self.by_name[member.name]
        found = self._by_role[member.role]
        found.remove(member)
        for place, other in enumerate(found):
            other.place = place
        self._candidates[member.role] = [other.candidate for other in found]
        self._known[member.role] = ()

    def load_changed(self, member: SimulatedMember) -> None:
        """Update the load of a worker: the larger of the requests sent to it and those that it has reported."""
        load = max(member.in_flight, member.reported.num_requests)
        if load != member.candidate.load:
            self._replace(member, replace(member.candidate, load=load))

    def reported(self, member: SimulatedMember, now: float) -> None:
        """Record the load in a worker's status for routing.

        Args:
            member: the worker.
            now: time of the status, in virtual seconds.
        """
        load = member.reported = member.replica.load
        candidate = replace(
            member.candidate,
            load=max(member.in_flight, load.num_requests),
            tokens_to_compute=load.tokens_to_compute,
            reported_at=now if load.tokens_to_compute else 0.0,
            blocks_total=load.blocks_total,
            blocks_free=load.blocks_free,
            blocks_cached=load.blocks_cached,
        )
        if candidate != member.candidate:
            self._replace(member, candidate)

    def _replace(self, member: SimulatedMember, candidate: Candidate) -> None:
        if self.by_name.get(member.name) is member:
            member.candidate = self._candidates[member.role][member.place] = candidate
            self._known[member.role] = ()

    def candidates(self, excluded: frozenset[str] = frozenset()) -> Candidates:
        """Return the workers of each role that are not excluded, or all workers of the role if all are excluded."""
        for role, found in self._candidates.items():
            if found and not self._known[role]:
                self._known[role] = tuple(found)
        every = Candidates(self._known[PREFILL], self._known[DECODE], self._known[BOTH])
        if not excluded:
            return every

        def others(some: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
            return tuple(one for one in some if one.address not in excluded) or some

        return Candidates(others(every.prefill), others(every.decode), others(every.both))

    def __iter__(self) -> Iterator[SimulatedMember]:
        return iter(list(self.by_name.values()))

    def __len__(self) -> int:
        return len(self.by_name)


def feed_of(
    clock: VirtualClock, cache_map: CacheMap, name: str, incarnation: str, latency: float
) -> Callable[[list[CacheChange]], None]:
    """Subscribe the map to the cache of a new worker, which is empty; return the sink of its changes. A worker for
    which the map has no room stays unknown to it, and the gateway predicts its cache from what it dispatches.

    Args:
        clock: clock of the simulation.
        cache_map: the gateway's map; the worker joins it.
        name: name of the worker, also its address in the map.
        incarnation: incarnation of the worker.
        latency: delay from a change to its application to the map, in seconds.
    """
    cache_map.join(name)
    cache_map.met(name, incarnation)
    with suppress(FeedBroken):
        cache_map.subscribed(name)
        for _ in cache_map.apply(name, SnapshotPart(incarnation, 0, b"", is_last=True, digest=Digest(0, 0))):
            pass
    sequence = count = xor = 0

    def changed(changes: list[CacheChange]) -> None:
        nonlocal sequence, count, xor
        removed: dict[bytes, None] = {}
        stored: dict[bytes, None] = {}
        for change in changes:
            if change.stored is not None:
                stored[change.name] = None
            elif change.name in stored:
                del stored[change.name]
            else:
                removed[change.name] = None
        if not removed and not stored:
            return
        sequence += 1
        count += len(stored) - len(removed)
        xor ^= xor_of(b"".join((*removed, *stored)))
        delta = CacheDelta(incarnation, sequence, b"".join(removed), b"".join(stored), Digest(count, xor))
        clock.after(latency, lambda: deliver(delta))

    def deliver(delta: CacheDelta) -> None:
        replica = cache_map.replicas.get(name)
        if replica is not None and replica.incarnation == incarnation and replica.state is not MapState.BLIND:
            with suppress(FeedBroken):
                for _ in cache_map.apply(name, delta):
                    pass
                while cache_map.needs_sweep:  # of a worker whose map was dropped to make room
                    for _ in cache_map.sweep():
                        pass

    return changed
