"""Holds the Lease: waits for it, renews it, gives it back. Losing it ends the process, which is started anew."""

import asyncio
import logging
from datetime import UTC, datetime

from kvferry.core.clock import Clock
from kvferry.core.errors import KvferryError, Unavailable
from kvferry.operator.api import ApiRefusal, KubeApi
from kvferry.operator.lease import LeaseTimes, Sighting, given_back, may_take, sighted, taken
from kvferry.operator.spec import Json

_log = logging.getLogger(__name__)
_API = "coordination.k8s.io/v1"
_LOOK_SECONDS = 1.0
"""A lease that was given back is found within so long."""


class LeadershipLost(KvferryError):
    """Another operator may lead now; this one must not write any more."""

    reason = "LEADERSHIP_LOST"


class Leader:
    """One candidate."""

    def __init__(self, api: KubeApi, clock: Clock, times: LeaseTimes, *, me: str, namespace: str, name: str) -> None:
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
        """Whether writing is safe: nobody else can have the lease yet. False also after a stop of the whole process,
        before anything in it has noticed. Any thread may ask."""
        return not self._fenced and self._clock.monotonic() - self._renewed < self._times.deadline

    def fence(self) -> None:
        """From now on nothing is to be written."""
        self._fenced = True

    async def acquire(self) -> None:
        """Return when this operator leads."""
        said = ""
        while True:
            try:
                lease = await asyncio.to_thread(self._try)
            except KvferryError as error:
                lease, news = None, f"cannot read the lease: {error.message}"
            else:
                news = f"waiting for {(lease or {}).get('spec', {}).get('holderIdentity')}, which leads"
            if self._held is not None:
                _log.info("this operator leads, as %s", self._me)
                return
            if news != said:
                _log.info("%s", news)
                said = news
            await asyncio.sleep(min(self._times.renew / 2, _LOOK_SECONDS))

    async def keep(self) -> None:
        """Renew until cancelled.

        Raises:
            LeadershipLost: it could not be renewed in time, or somebody else has it.
        """
        while True:
            await asyncio.sleep(self._times.renew)
            try:
                self._in_time()
                async with asyncio.timeout(self._times.deadline):
                    await asyncio.to_thread(self._renew)
            except (Unavailable, TimeoutError) as error:
                _log.warning("the lease was not renewed: %s", error)
                self._in_time()

    def _in_time(self) -> None:
        silent = self._clock.monotonic() - self._renewed
        if silent > self._times.deadline:
            raise LeadershipLost(f"the lease has not been renewed for {silent:.0f} s")

    async def give_back(self) -> None:
        """Let the next one begin at once. Best effort: the lease would run out anyway."""
        if self._held is None:
            return
        held, self._held = self._held, None
        try:
            async with asyncio.timeout(2):
                await asyncio.to_thread(self._api.replace, given_back(held, self._stamp()))
        except (KvferryError, TimeoutError) as error:
            _log.info("the lease was not given back: %s", error)

    def _try(self) -> Json | None:
        lease = self._api.get(_API, "Lease", self._namespace, self._name)
        now = self._clock.monotonic()
        if lease is not None:
            self._seen = sighted(self._seen, lease["metadata"]["resourceVersion"], now)
        if not may_take(lease, self._me, self._seen, now):
            return lease
        made = taken(lease, self._me, self._times, self._stamp(), name=self._name, namespace=self._namespace)
        try:
            self._held = self._api.create(made) if lease is None else self._api.replace(made)
            self._renewed = now
        except ApiRefusal as refusal:
            if refusal.status != 409:
                raise
        return lease

    def _renew(self) -> None:
        assert self._held is not None
        begun = self._clock.monotonic()  # the others count from when it is written, which is later
        made = taken(self._held, self._me, self._times, self._stamp(), name=self._name, namespace=self._namespace)
        try:
            self._held = self._api.replace(made)
            self._renewed = begun
        except ApiRefusal as refusal:
            if refusal.status not in (404, 409):
                raise Unavailable(f"the lease was refused: {refusal.message}") from refusal
            lease = self._api.get(_API, "Lease", self._namespace, self._name)
            if lease is None or lease["spec"].get("holderIdentity") != self._me:
                raise LeadershipLost("another operator has the lease") from refusal
            self._held = lease

    def _stamp(self) -> str:
        return datetime.fromtimestamp(self._clock.wall(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
