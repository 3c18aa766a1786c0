"""Stored responses: bounded in bytes, per tenant and in total, and in time. No I/O.

A conversation's items are kept once, as segments that the responses of its turns share, so that a response stays usable
when earlier ones are evicted or deleted.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.core.clock import Clock
from kvferry.core.errors import InvalidRequest, shortened
from kvferry.gateway.decide.config import StoreLimits

_ENTRY_BYTES = 1024
"""Approximate memory of an entry in addition to its JSON, in bytes."""


class ResponseNotFound(InvalidRequest):
    """The tenant has no response with this id: it was not stored, has expired, was evicted, or belongs to another
    gateway."""

    http_status = 404
    reason = "RESPONSE_NOT_FOUND"


@dataclass(slots=True, eq=False)
class Segment:
    """Items of one turn as a JSON array, input or output."""

    items: bytes
    num_owners: int = 0


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A finished response, stored so that later requests can continue from it."""

    response: bytes
    """The response as JSON."""
    own_items: bytes
    """The input items of its request, a JSON array."""
    transcript: tuple[Segment, ...]
    """All items up to and including its output, in order."""
    events: tuple[bytes, ...] = ()
    """Server-sent events of a response in the background that is streamed; the index is the sequence number."""


@dataclass(slots=True)
class _Tenant:
    responses: OrderedDict[str, tuple[KeptResponse, float]] = field(default_factory=OrderedDict)
    """Responses and the times of their last use, the oldest first."""
    num_bytes: int = 0


class ResponseStore:
    """The kept responses of all tenants. Used on the event loop's thread only."""

    def __init__(self, limits: StoreLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        """Tenants by their last use, the oldest first."""
        self.num_bytes = 0
        self.running: set[tuple[str, str]] = set()
        """Tenants and ids of the responses that are being created in the background."""

    def put(self, tenant: str, response_id: str, kept: KeptResponse) -> None:
        """Keep a response; evicts the tenant's least recently used ones, then responses of the least recently active
        tenant. A response that exceeds the tenant's bound by itself is not kept."""
        self._expire()
        if tenant in self._tenants:
            self._remove(tenant, response_id)
        owner = self._tenants.setdefault(tenant, _Tenant())
        self._tenants.move_to_end(tenant)
        owner.responses[response_id] = (kept, self._clock.monotonic())
        self._count(owner, self._enter(kept))
        while owner.num_bytes > self._limits.tenant_bytes:
            self._remove(tenant, next(iter(owner.responses)))
        while self.num_bytes > self._limits.total_bytes:
            oldest = next(iter(self._tenants))
            self._remove(oldest, next(iter(self._tenants[oldest].responses)))

    def get(self, tenant: str, response_id: str, field: str) -> KeptResponse:
        """Return a response, and keep it longer.

        Args:
            tenant: tenant of the caller; responses of other tenants are not found.
            response_id: id of the response.
            field: field of the request that names the response.

        Raises:
            ResponseNotFound: the response is not kept.
        """
        self._expire()
        owner = self._tenants.get(tenant)
        found = None if owner is None else owner.responses.get(response_id)
        if (tenant, response_id) in self.running:
            raise ResponseNotFound(
                f"response {shortened(response_id)!r} is still being created in the background; wait until it has "
                "ended, or cancel it",
                field=field,
            )
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

    def delete(self, tenant: str, response_id: str) -> None:
        """Drop a response.

        Raises:
            ResponseNotFound: the response is not kept.
        """
        self.get(tenant, response_id, "response_id")
        self._remove(tenant, response_id)

    @property
    def count(self) -> int:
        """Number of responses."""
        return sum(len(owner.responses) for owner in self._tenants.values())

    def _expire(self) -> None:
        limit = self._clock.monotonic() - self._limits.seconds
        for tenant, owner in list(self._tenants.items()):
            while owner.responses:
                response_id, (_, used) = next(iter(owner.responses.items()))
                if used > limit:
                    break
                self._remove(tenant, response_id)

    def _enter(self, kept: KeptResponse) -> int:
        """Take ownership of the segments; return the bytes that are added."""
        added = _own_bytes(kept)
        for segment in kept.transcript:
            added += 0 if segment.num_owners else len(segment.items)
            segment.num_owners += 1
        return added

    def _remove(self, tenant: str, response_id: str) -> None:
        owner = self._tenants[tenant]
        found = owner.responses.pop(response_id, None)
        if found is not None:
            kept, freed = found[0], _own_bytes(found[0])
            for segment in kept.transcript:
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


def transcript(earlier: KeptResponse | None, items: bytes, output: bytes) -> tuple[Segment, ...]:
    """Return the segments of all turns: those of `earlier`, and the items and the output of a new turn.

    Args:
        earlier: the response that the new turn continues; `None` if it begins a conversation.
        items: encoded input items of the new turn.
        output: encoded output items of the new turn.
    """
    return (*(() if earlier is None else earlier.transcript), Segment(items), Segment(output))


def history(earlier: KeptResponse | None) -> Sequence[bytes]:
    """Return the items of all turns up to and including `earlier`."""
    return [] if earlier is None else [segment.items for segment in earlier.transcript]
