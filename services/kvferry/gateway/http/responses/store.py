"""Stored responses: what the implementations of the store have in common. No I/O.

Two implementations: `memory_store` for one gateway, `shared_store` for all gateways of a pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvferry.core.errors import InvalidRequest, KvferryError, shortened

LEASE_SECONDS = 10.0
"""Time after which a response in the background has failed if its gateway has not renewed it."""


class ResponseNotFound(InvalidRequest):
    """The tenant has no response with this id: it was not stored, has expired, was evicted or deleted, or belongs to
    another tenant or gateway."""

    http_status = 404
    reason = "RESPONSE_NOT_FOUND"


class ConversationTooLong(InvalidRequest):
    """The response cannot be continued, since its conversation has too many turns or bytes."""

    reason = "CONVERSATION_TOO_LONG"


class ResponsesUnavailable(KvferryError):
    """The server that keeps the responses does not answer, or refuses; a retry is safe."""

    grpc_status = "UNAVAILABLE"
    http_status = 503
    reason = "RESPONSES_UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class Earlier:
    """A stored response that a new one continues."""

    link: Any
    """Reference of the store that returned it."""


@dataclass(frozen=True, slots=True)
class NewResponse:
    """A response that is to be stored so that later requests can continue from it."""

    response: bytes
    """The response as JSON."""
    items: bytes
    """The input items of its request, a JSON array."""
    output: bytes
    """Its output items, a JSON array."""
    earlier: Earlier | None = None
    """The response that it continues; `None` for the first turn."""
    events: tuple[bytes, ...] = ()
    """Server-sent events of a response in the background that is streamed; the index is the sequence number."""


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A stored response."""

    response: bytes
    """The response as JSON."""
    own_items: bytes
    """The input items of its request, a JSON array."""
    events: tuple[bytes, ...] = ()
    """See `NewResponse.events`; empty while it runs."""
    is_running: bool = False
    """Whether a gateway creates it in the background."""


class ResponseStore(Protocol):
    """The stored responses of all tenants. Used on the event loop's thread only.

    All methods but `check` raise `ResponsesUnavailable` if a server keeps the responses and does not answer in time.
    """

    def check(self) -> None:
        """Return if responses can be stored, as far as is known without asking.

        Raises:
            ResponsesUnavailable: the last call failed a moment ago.
        """

    async def put(self, tenant: str, response_id: str, new: NewResponse, *, is_background: bool = False) -> bool:
        """Keep a response that has ended; evicts the least recently used ones.

        Args:
            tenant: owner of the response.
            response_id: id of the response.
            new: the response.
            is_background: whether it was begun with `begin`.

        Returns:
            Whether it is kept; it is not if it exceeds a bound by itself, or if it is one in the background that was
            deleted or has failed meanwhile.
        """

    async def begin(self, tenant: str, response_id: str, new: NewResponse) -> bool:
        """Note a response that this gateway begins to create in the background; return whether it is kept."""

    async def renew(self, running: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
        """Keep the leases of running responses; return those which are to be ended, since they were cancelled or
        deleted at another gateway.

        Args:
            running: tenants and ids of the responses that this gateway creates.
        """

    async def read(self, tenant: str, response_id: str, field: str) -> KeptResponse:
        """Return a response, and keep it longer.

        Args:
            tenant: tenant of the caller; responses of other tenants are not found.
            response_id: id of the response.
            field: field of the request that names the response.

        Raises:
            ResponseNotFound: the response is not kept.
        """

    async def continued(self, tenant: str, response_id: str, field: str) -> tuple[Earlier, Sequence[bytes]]:
        """Return a response that a request continues, and the items of its conversation up to and including its output,
        as JSON arrays in order; keeps it longer.

        Args:
            tenant: tenant of the caller.
            response_id: id of the response.
            field: field of the request that names the response.

        Raises:
            ConversationTooLong: the conversation has reached a bound.
            ResponseNotFound: the response is not kept, runs, or a response before it is gone.
        """

    async def cancel(self, tenant: str, response_id: str) -> bool:
        """Have the gateway that creates a response end it; return whether one does."""

    async def delete(self, tenant: str, response_id: str) -> None:
        """Drop a response. Responses that continue it keep their conversation.

        Raises:
            ResponseNotFound: the response is not kept.
        """


def still_running(response_id: str, field: str) -> ResponseNotFound:
    """Return the error of a request that needs a response which has not ended."""
    return ResponseNotFound(
        f"response {shortened(response_id)!r} is still being created in the background; wait until it has ended, or "
        "cancel it",
        field=field,
    )


def too_long(num_turns: int, num_bytes: int, field: str) -> ConversationTooLong:
    """Return the error of a request that continues a conversation which has reached a bound."""
    return ConversationTooLong(
        f"the conversation has {num_turns} turns and {num_bytes} bytes, and is at its bound; send the items that "
        "matter as input, without previous_response_id",
        field=field,
    )
