"""Stored responses that all gateways of a pool share, in Redis.

A turn is stored once, with the name of the turn before it. Values are sealed for their key, and a turn names the one
before it within the sealed value, so that a client that can write to Redis cannot move turns between conversations.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.errors import shortened
from kvferry.core.process.struct_types import describe
from kvferry.core.rare_lines import RareLines, more
from kvferry.gateway.decide.config import StoreLimits
from kvferry.gateway.http.responses import shared_scripts as scripts
from kvferry.gateway.http.responses.store import (
    LEASE_SECONDS,
    Earlier,
    KeptResponse,
    NewResponse,
    ResponseNotFound,
    ResponsesUnavailable,
    still_running,
    too_long,
)
from kvferry.gateway.state.pool_seal import PoolSeal
from kvferry.gateway.state.state_client import StateClient, StateScript, StoreUnavailable

_log = logging.getLogger(__name__)
_CALL_SECONDS = 2.0
"""Time limit of a call, with the time for which it waits for other calls."""
_MAX_CALLS = 8
"""Maximum number of calls at a time, so that others find a free connection."""
_RETRY_SECONDS = 1.0
"""Time after a failed call in which no other one is tried."""
_ENTRY_BYTES = 1024
"""Approximate memory of a response in Redis in addition to its values, in bytes."""
_HOLD_SECONDS = 900.0
"""Time for which a deleted response is kept if a request has continued it, which may still be running."""
_PART = "responses"
"""Label of the calls in metrics."""
_MISSING, _RUNNING, _LOST, _LONG, _CUT = 0, 2, 3, 4, 5


class _Turn(msgspec.Struct, array_like=True):
    parent: bytes
    """Name of the response before it; empty for none."""
    items: bytes


class _Output(msgspec.Struct):
    output: msgspec.Raw


describe(_Turn)
describe(_Output)


class SharedResponses:
    """The stored responses of a pool; see `ResponseStore` for its methods. Used on the event loop's thread only."""

    def __init__(
        self,
        client: StateClient,
        seal: PoolSeal,
        gateway: str,
        limits: StoreLimits,
        clock: Clock,
        *,
        on_failure: Callable[[str], None] = lambda _: None,
        wall_ms: Callable[[], int] | None = None,
    ) -> None:
        """
        Args:
            client: calls the server.
            seal: derives names and seals.
            gateway: a name that no other gateway has, and no earlier process of this one.
            limits: bounds of the responses, over all gateways.
            clock: time of failures and log lines.
            on_failure: called with the reason when a response could not be stored or read, for metrics.
            wall_ms: time in the scripts, in ms; `None` for the server's.
        """
        self._client, self._seal, self._gateway = client, seal, gateway.encode()
        self._limits, self._clock = limits, clock
        self._on_failure, self._wall_ms = on_failure, wall_ms
        self._root = seal.prefix + b"r:"
        self._put, self._read, self._continue, self._renew, self._cancel, self._delete = (
            client.script(_PART, text)
            for text in (
                scripts.PUT, scripts.READ, scripts.CONTINUE, scripts.RENEW, scripts.CANCEL, scripts.DELETE
            )
        )  # fmt: skip
        self._places = asyncio.Semaphore(_MAX_CALLS)
        self._failed_at: float | None = None
        self._why = ""
        self._lines = RareLines(clock)

    def check(self) -> None:
        """See `ResponseStore.check`."""
        if self._failed_at is not None and self._clock.monotonic() - self._failed_at < _RETRY_SECONDS:
            self._on_failure("unreachable")
            raise self._unavailable()

    async def put(self, tenant: str, response_id: str, new: NewResponse, *, is_background: bool = False) -> bool:
        """See `ResponseStore.put`."""
        return await self._write(tenant, response_id, new, self._gateway if is_background else b"", 0.0)

    async def begin(self, tenant: str, response_id: str, new: NewResponse) -> bool:
        """See `ResponseStore.begin`."""
        return await self._write(tenant, response_id, new, self._gateway, LEASE_SECONDS)

    async def renew(self, running: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
        """See `ResponseStore.renew`."""
        members = [self._member(*each) for each in running]
        found = await self._run(self._renew, b"", self._gateway, round(1e3 * LEASE_SECONDS), *members)
        return [each for each, ends in zip(running, found, strict=True) if ends]

    async def read(self, tenant: str, response_id: str, field: str) -> KeptResponse:
        """See `ResponseStore.read`."""
        member = self._member(tenant, response_id)
        state, *values = await self._run(self._read, member, self._limits.turns)
        if state == _MISSING:
            raise _not_found(response_id, field)
        lease, turn, response, events = values
        seal = self._seal.seal(member)
        opened, whole = seal.opened(b"i", turn, _Turn), seal.opened(b"o", response, bytes)
        recorded = seal.opened(b"v", events, tuple[bytes, ...]) if events else ()
        if opened is None or whole is None or recorded is None:
            self._note("foreign", "a response does not open with the pool's key, and is not found")
            raise _not_found(response_id, field)
        if state == _LOST:
            return KeptResponse(_failed(whole, int(lease) / 1e3), opened.items)
        return KeptResponse(whole, opened.items, recorded, is_running=state == _RUNNING)

    async def continued(self, tenant: str, response_id: str, field: str) -> tuple[Earlier, Sequence[bytes]]:
        """See `ResponseStore.continued`."""
        member = self._member(tenant, response_id)
        state, *values = await self._run(
            self._continue, member, self._limits.turns, self._limits.conversation_bytes, round(1e3 * _HOLD_SECONDS)
        )
        if state == _MISSING:
            raise _not_found(response_id, field)
        if state == _RUNNING:
            raise still_running(response_id, field)
        if state == _LONG:
            raise too_long(int(values[0]), int(values[1]), field)
        items = None if state == _CUT else self._history(member, values)
        if items is None:
            raise ResponseNotFound(
                f"the conversation of response {shortened(response_id)!r} is not stored as a whole any more: a "
                "response before it has expired, was evicted, or was deleted while this one was created; send the "
                "conversation's items as input",
                field=field,
            )
        return Earlier(member), items

    async def cancel(self, tenant: str, response_id: str) -> bool:
        """See `ResponseStore.cancel`."""
        (state,) = await self._run(self._cancel, self._member(tenant, response_id))
        return bool(state == _RUNNING)

    async def delete(self, tenant: str, response_id: str) -> None:
        """See `ResponseStore.delete`."""
        (state,) = await self._run(self._delete, self._member(tenant, response_id))
        if state == _MISSING:
            raise _not_found(response_id, "response_id")

    def _member(self, tenant: str, response_id: str) -> bytes:
        return b"%s:%s" % (self._seal.tenant(tenant), self._seal.response(tenant, response_id))

    async def _write(
        self, tenant: str, response_id: str, new: NewResponse, gateway: bytes, lease_seconds: float
    ) -> bool:
        member = self._member(tenant, response_id)
        parent: bytes = b"" if new.earlier is None else new.earlier.link
        seal = self._seal.seal(member)
        fields = [b"i", seal.sealed(b"i", _Turn(parent, new.items)), b"o", seal.sealed(b"o", new.response)]
        if new.events:
            fields += [b"v", seal.sealed(b"v", new.events)]
        size, turn = _ENTRY_BYTES + sum(map(len, fields)), len(new.items) + len(new.output)
        limits = self._limits
        (result,) = await self._run(
            self._put, member, parent, gateway, round(1e3 * lease_seconds), size, turn, limits.total_bytes,
            limits.tenant_bytes, limits.turns, *fields,
        )  # fmt: skip
        if result:
            self._on_failure("fenced" if result == 1 else "full")
        return not result

    def _history(self, member: bytes, values: Sequence[bytes]) -> list[bytes] | None:
        """Return the items of a conversation; `None` if its turns do not follow each other.

        Args:
            member: name of its last turn.
            values: name and sealed values of each turn, the last one first.
        """
        items: list[bytes] = []
        for place in range(0, len(values), 3):
            name, turn, response = values[place : place + 3]
            seal = self._seal.seal(name)
            opened, whole = seal.opened(b"i", turn, _Turn), seal.opened(b"o", response, bytes)
            if opened is None or whole is None or name != member:
                self._note("foreign", "a conversation does not open with the pool's key, and is not continued")
                return None
            items += [bytes(msgspec.json.decode(whole, type=_Output).output), opened.items]
            member = opened.parent
        items.reverse()
        return None if member else items

    async def _run(self, script: StateScript, member: bytes, *arguments: bytes | int) -> list[Any]:
        """Run a script.

        Raises:
            ResponsesUnavailable: the server did not answer in time, or with an error, or did not answer a moment ago.
        """
        self.check()
        now = b"" if self._wall_ms is None else self._wall_ms()
        keys = (self._root, self._root + b"ends", self._root + b"bytes")
        try:
            async with asyncio.timeout(_CALL_SECONDS), self._places:
                found = await script.run(
                    keys, [now, round(1e3 * self._limits.seconds), member, *arguments], _CALL_SECONDS
                )
        except (StoreUnavailable, TimeoutError) as error:
            slow = f"Redis at {self._client.server.text} does not answer in time"
            self._why = error.message if isinstance(error, StoreUnavailable) else slow
            has_answered = isinstance(error, StoreUnavailable) and error.has_answered
            self._failed_at = None if has_answered else self._clock.monotonic()
            self._note("unreachable", f"responses are not stored: {self._why}")
            raise self._unavailable() from None
        self._failed_at = None
        return found

    def _unavailable(self) -> ResponsesUnavailable:
        return ResponsesUnavailable(
            f"responses can be neither stored nor read: {self._why}; send the request again, or with store false and "
            "the conversation's items as input",
            retry_after_seconds=_RETRY_SECONDS,
        )

    def _note(self, reason: str, line: str) -> None:
        self._on_failure(reason)
        if (left_out := self._lines.left_out(reason)) is not None:
            _log.warning("%s%s", line, more(left_out))


def _not_found(response_id: str, field: str) -> ResponseNotFound:
    return ResponseNotFound(
        f"response {shortened(response_id)!r} is not stored: it was never stored, has expired, or was evicted or "
        "deleted; send the conversation's items as input",
        field=field,
    )


def _failed(response: bytes, at: float) -> bytes:
    """Return a response that its gateway has not ended, as one that has failed.

    Args:
        response: the response as it was begun, JSON.
        at: end of its lease, wall-clock seconds since the epoch.
    """
    whole = msgspec.json.decode(response)
    message = "the gateway that created this response has ended before it was complete; send the request again"
    whole |= {"status": "failed", "completed_at": at, "error": {"code": "server_error", "message": message}}
    return msgspec.json.encode(whole)
