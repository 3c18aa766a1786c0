"""Identifiers that look alike and must not be mixed up."""

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
"""Names one request from the client's edge to the last log line; also `x-request-id`."""

BlockId = NewType("BlockId", int)
"""Index of a physical block (page) in one engine's pool."""

BlockHash = NewType("BlockHash", bytes)
"""The name of a block's content: 32 bytes of the keyed BLAKE3 chain (`core.hashing`)."""

WorkerId = NewType("WorkerId", str)
"""A worker's stable name, for example its host and port, or its pod name."""

Incarnation = NewType("Incarnation", str)
"""One life of a worker process: 16 hex digits drawn at start. A restarted worker is another one."""

TicketId = NewType("TicketId", str)
"""Names one offer of KV blocks by a prefill worker: 32 hex digits."""


def new_incarnation() -> Incarnation:
    """A fresh incarnation, unique with overwhelming probability."""
    return Incarnation(secrets.token_hex(8))


def new_ticket_id() -> TicketId:
    """A fresh ticket id; not a secret, the ticket's MAC is what proves it."""
    return TicketId(secrets.token_hex(16))


def new_request_id() -> RequestId:
    """A request id for a client that brought none."""
    return RequestId(f"req-{secrets.token_hex(12)}")
