"""Stored responses of one gateway: bounded in bytes, per tenant and in total, and in time. No I/O.

A conversation's items are kept once, as segments that the responses of its turns share, so that a response stays usable
when earlier ones are evicted or deleted.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.core.clock import Clock
from kvferry.core.errors import shortened
from kvferry.gateway.decide.config import StoreLimits
from kvferry.gateway.http.responses.store import (
    Earlier,
    KeptResponse,
    NewResponse,
    ResponseNotFound,
    still_running,
    too_long,
)

_ENTRY_BYTES = 1024
"""Approximate memory of an entry in addition to its JSON, in bytes."""


@dataclass(slots=True, eq=False)
class Segment:
    """Items of one turn as a JSON array, input or output."""

    items: bytes
    num_owners: int = 0


@dataclass(frozen=True, slots=True)
class _Entry:
    kept: KeptResponse
    transcript: tuple[Segment, ...]
    """All items up to and including its output, in order."""


@dataclass(slots=True)
class _Tenant:
    responses: OrderedDict[str, tuple[_Entry, float]] = field(default_factory=OrderedDict)
    """Responses and the times of their last use, the oldest first."""
    num_bytes: int = 0


class MemoryResponses:
    """The stored responses of one gateway, in its memory; see `ResponseStore` for its methods."""

    def __init__(self, limits: StoreLimits, clock: Clock) -> None:
        """
        Args:
            limits: bounds of the responses.
            clock: time of their last uses.
        """
        self._limits = limits
        self._clock = clock
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        """Tenants by their last use, the oldest first."""
        self.num_bytes = 0
        self._running: dict[tuple[str, str], KeptResponse] = {}
        """The responses that are being created in the background, which are not counted."""

    def check(self) -> None:
        """See `ResponseStore.check`; never raises."""

    async def put(self, tenant: str, response_id: str, new: NewResponse, *, is_background: bool = False) -> bool:
        """See `ResponseStore.put`."""
        if self._running.pop((tenant, response_id), None) is None and is_background:
            return False
        self._expire()
        if tenant in self._tenants:
            self._remove(tenant, response_id)
        owner = self._tenants.setdefault(tenant, _Tenant())
        self._tenants.move_to_end(tenant)
        before: tuple[Segment, ...] = () if new.earlier is None else new.earlier.link
        kept = KeptResponse(new.response, new.items, new.events)
        entry = _Entry(kept, (*before, Segment(new.items), Segment(new.output)))
        owner.responses[response_id] = (entry, self._clock.monotonic())
        self._count(owner, self._enter(entry))
        while owner.num_bytes > self._limits.tenant_bytes:
            self._remove(tenant, next(iter(owner.responses)))
        while self.num_bytes > self._limits.total_bytes:
            oldest = next(iter(self._tenants))
            self._remove(oldest, next(iter(self._tenants[oldest].responses)))
        return response_id in owner.responses

    async def begin(self, tenant: str, response_id: str, new: NewResponse) -> bool:
        """See `ResponseStore.begin`."""
        self._running[tenant, response_id] = KeptResponse(new.response, new.items, is_running=True)
        return True

    async def renew(self, running: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
        """See `ResponseStore.renew`."""
        return [key for key in running if key not in self._running]

    async def read(self, tenant: str, response_id: str, field: str) -> KeptResponse:
        """See `ResponseStore.read`."""
        running = self._running.get((tenant, response_id))
        return self._get(tenant, response_id, field).kept if running is None else running

    async def continued(self, tenant: str, response_id: str, field: str) -> tuple[Earlier, Sequence[bytes]]:
        """See `ResponseStore.continued`."""
        if (tenant, response_id) in self._running:
            raise still_running(response_id, field)
        segments = self._get(tenant, response_id, field).transcript
        num_turns, num_bytes = len(segments) // 2, sum(len(segment.items) for segment in segments)
        if num_turns >= self._limits.turns or num_bytes >= self._limits.conversation_bytes:
            raise too_long(num_turns, num_bytes, field)
        return Earlier(segments), [segment.items for segment in segments]

    async def cancel(self, tenant: str, response_id: str) -> bool:
        """See `ResponseStore.cancel`; this gateway cancels its responses itself."""
        return False

    async def delete(self, tenant: str, response_id: str) -> None:
        """See `ResponseStore.delete`."""
        if self._running.pop((tenant, response_id), None) is None:
            self._get(tenant, response_id, "response_id")
            self._remove(tenant, response_id)

    @property
    def count(self) -> int:
        """Number of responses."""
        return sum(len(owner.responses) for owner in self._tenants.values())

    def _get(self, tenant: str, response_id: str, field: str) -> _Entry:
        """Return a response that has ended, and keep it longer.

        Raises:
            ResponseNotFound: the response is not kept.
        """
        self._expire()
        owner = self._tenants.get(tenant)
        found = None if owner is None else owner.responses.get(response_id)
        if owner is None or found is None:
            raise ResponseNotFound(
                f"response {shortened(response_id)!r} is not stored by this gateway: it was never stored, has expired, "
                "was evicted or deleted, or belongs to another gateway; send the conversation's items as input",
                field=field,
            )
        owner.responses[response_id] = (found[0], self._clock.monotonic())
        owner.responses.move_to_end(response_id)
        self._tenants.move_to_end(tenant)
        return found[0]

    def _expire(self) -> None:
        limit = self._clock.monotonic() - self._limits.seconds
        for tenant, owner in list(self._tenants.items()):
            while owner.responses:
                response_id, (_, used) = next(iter(owner.responses.items()))
                if used > limit:
                    break
                self._remove(tenant, response_id)

    def _enter(self, entry: _Entry) -> int:
        """Take ownership of the segments; return the bytes that are added."""
        added = _own_bytes(entry.kept)
        for segment in entry.transcript:
            added += 0 if segment.num_owners else len(segment.items)
            segment.num_owners += 1
        return added

    def _remove(self, tenant: str, response_id: str) -> None:
        owner = self._tenants[tenant]
        found = owner.responses.pop(response_id, None)
        if found is not None:
            entry, freed = found[0], _own_bytes(found[0].kept)
            for segment in entry.transcript:
                segment.num_owners -= 1
                freed += 0 if segment.num_owners else len(segment.items)
            self._count(owner, -freed)
        if not owner.responses:
            del self._tenants[tenant]

    def _count(self, owner: _Tenant, num_bytes: int) -> None:
        owner.num_bytes += num_bytes
        self.num_bytes += num_bytes


def _own_bytes(kept: KeptResponse) -> int:
    """Return the size of what a response does not share with other turns."""
    return _ENTRY_BYTES + len(kept.response) + len(kept.own_items) + sum(map(len, kept.events))
