"""Leader election: acquires, renews and releases the lease. The process exits if it loses the lease."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from kvferry.core.clock import Clock
from kvferry.core.errors import KvferryError, Unavailable
from kvferry.operator.api import ApiRefusal, KubeApi
from kvferry.operator.plan.process.lease import LeaseTimes, Sighting, may_take, released, sighted, taken, watched_by
from kvferry.operator.pool.spec import Json
from kvferry.operator.process.config import LEASE

_log = logging.getLogger(__name__)
_API = "coordination.k8s.io/v1"
_RETRY_SECONDS = 1.0
"""Maximum time in seconds until a candidate detects that the lease was released."""
_POLL_SECONDS = 0.5


class LeadershipLost(KvferryError):
    """The lease was lost; this operator must no longer write."""

    reason = "LEADERSHIP_LOST"


class Leader:
    """Candidate in leader election."""

    def __init__(
        self,
        api: KubeApi,
        clock: Clock,
        times: LeaseTimes,
        *,
        me: str,
        namespace: str,
        name: str,
        watched: Sequence[str] = (),
    ) -> None:
        """
        Args:
            api: client for reads and writes of the lease.
            clock: clock of the deadlines and of the times in the lease.
            times: durations of leader election.
            me: identity of this process, unique among candidates.
            namespace: namespace of the lease.
            name: name of the lease.
            watched: namespaces whose pools this operator reconciles; empty for all.
        """
        self._watched = tuple(watched)
        self._api = api
        self._clock = clock
        self._times = times
        self._me = me
        self._namespace = namespace
        self._name = name
        self._seen: Sighting | None = None
        self._held: Json | None = None
        self._renewed = float("-inf")
        self._fenced = False

    def holds(self) -> bool:
        """Return whether this operator may write because no other candidate can hold the lease; `False` also directly
        after the process was suspended for too long. Thread-safe."""
        return not self._fenced and self._clock.monotonic() - self._renewed < self._times.deadline

    def fence(self) -> None:
        """Forbid all further writes of this process to the API server."""
        self._fenced = True

    async def acquire(self) -> None:
        """Wait until this operator holds the lease."""
        logged = ""
        while True:
            try:
                lease = await asyncio.to_thread(self._try)
            except KvferryError as error:
                lease, state = None, f"cannot read the lease: {error.message}"
            else:
                state = f"waiting for the lease, held by {(lease or {}).get('spec', {}).get('holderIdentity')}"
            if self._held is not None:
                _log.info("this operator holds the lease as %s", self._me)
                return
            if state != logged:
                _log.info("%s", state)
                logged = state
            await asyncio.sleep(min(self._times.renew / 2, _RETRY_SECONDS))

    async def keep(self) -> None:
        """Renew the lease until cancelled.

        Raises:
            LeadershipLost: the lease could not be renewed in time, or a different operator holds it.
        """
        while True:
            await asyncio.sleep(self._times.renew)
            try:
                self._in_time()
                async with asyncio.timeout(self._times.deadline):
                    await asyncio.to_thread(self._renew)
            except (Unavailable, TimeoutError) as error:
                _log.warning("cannot renew the lease: %s", error)
                self._in_time()

    def _in_time(self) -> None:
        silent = self._clock.monotonic() - self._renewed
        if silent > self._times.deadline:
            raise LeadershipLost(f"the lease has not been renewed for {silent:.0f} s")

    async def release(self) -> None:
        """Release the lease, so that a candidate can take it immediately. Best effort, since the lease also expires."""
        if self._held is None:
            return
        held, self._held = self._held, None
        try:
            async with asyncio.timeout(2):
                await asyncio.to_thread(self._api.replace, released(held, self._stamp()))
        except (KvferryError, TimeoutError) as error:
            _log.info("cannot release the lease: %s", error)

    def _try(self) -> Json | None:
        lease = self._api.get(_API, "Lease", self._namespace, self._name)
        now = self._clock.monotonic()
        if lease is not None:
            self._seen = sighted(self._seen, lease["metadata"]["resourceVersion"], now)
        if not may_take(lease, self._me, self._seen, now):
            return lease
        made = self._taken(lease)
        try:
            self._held = self._api.create(made) if lease is None else self._api.replace(made)
            self._renewed = now
        except ApiRefusal as refusal:
            if refusal.status != 409:
                raise
        return lease

    def _renew(self) -> None:
        assert self._held is not None
        begun = self._clock.monotonic()  # before the write, since the expiry timers of candidates start after it
        made = self._taken(self._held)
        try:
            self._held = self._api.replace(made)
            self._renewed = begun
        except ApiRefusal as refusal:
            if refusal.status not in (404, 409):
                raise Unavailable(f"the API server rejected the lease: {refusal.message}") from refusal
            lease = self._api.get(_API, "Lease", self._namespace, self._name)
            if lease is None or lease["spec"].get("holderIdentity") != self._me:
                raise LeadershipLost("a different operator holds the lease") from refusal
            self._held = lease

    def _taken(self, lease: Json | None) -> Json:
        return taken(
            lease,
            self._me,
            self._times,
            self._stamp(),
            name=self._name,
            namespace=self._namespace,
            watched=self._watched,
        )

    def _stamp(self) -> str:
        return datetime.fromtimestamp(self._clock.wall(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """An operator that renews its lease."""

    identity: str
    namespaces: tuple[str, ...] = ()
    """Namespaces whose pools it reconciles; empty for all."""


async def leaders_of(api: KubeApi, timeout: float, name: str = LEASE) -> dict[str, LeaseHolder]:
    """Return the current holders of the operators' leases in all namespaces, by namespace of the lease.

    Args:
        api: client of the cluster's API server.
        timeout: time to wait for a renewal of each lease, in seconds.
        name: name of the leases.

    Raises:
        ApiRefusal: the account may not list leases.
    """
    leases = await asyncio.to_thread(lambda: list(api.list(_API, "Lease", None, fields={"metadata.name": name})))
    places = [str(lease["metadata"]["namespace"]) for lease in leases]
    found = await asyncio.gather(*(leader_of(api, place, timeout, name) for place in places))
    return {place: holder for place, holder in zip(places, found, strict=True) if holder}


async def leader_of(api: KubeApi, namespace: str, timeout: float, name: str = LEASE) -> LeaseHolder | None:
    """Return the current holder of a lease; `None` if no renewal was observed in time.

    Args:
        api: client of the cluster's API server.
        namespace: namespace of the lease.
        timeout: time to wait for a renewal, in seconds.
        name: name of the lease.

    Raises:
        ApiRefusal: the API server rejected the request.
        Unavailable: the API server is unavailable or busy.
    """
    renewed = ""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            while True:
                lease = await asyncio.to_thread(api.get, _API, "Lease", namespace, name)
                spec = (lease or {}).get("spec") or {}
                # Wait for a change of the lease instead of comparing renewTime, which is written by the clock of a
                # different machine.
                if spec.get("holderIdentity") and renewed and spec.get("renewTime") != renewed:
                    return LeaseHolder(str(spec["holderIdentity"]), watched_by(lease or {}))
                renewed = spec.get("renewTime") or ""
                await asyncio.sleep(_POLL_SECONDS)
    return None
