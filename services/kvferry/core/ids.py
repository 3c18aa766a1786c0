"""Distinct types for identifiers, so that the type checker detects mix-ups."""

import secrets
from typing import NamedTuple, NewType

RequestId = NewType("RequestId", str)
"""Identifies a request in all processes and logs; also the `x-request-id` header."""

BlockId = NewType("BlockId", int)
"""Index of a physical block (page) in an engine's pool."""

BlockHash = NewType("BlockHash", bytes)
"""Identifies a block's content: a 32-byte hash of the keyed BLAKE3 chain (`core.hashing`)."""

WorkerId = NewType("WorkerId", str)
"""A worker's stable name, for example its host and port, or its pod name."""

Incarnation = NewType("Incarnation", str)
"""Identifies one run of a worker process: 16 random hex digits; new after each restart."""

TicketId = NewType("TicketId", str)
"""Identifies an offer of KV blocks by a prefill worker: 32 hex digits."""


MAX_ADAPTER_NAME_CHARS = 128
ADAPTER_DIGEST_BYTES = 32


class AdapterId(NamedTuple):
    """One version of an adapter. KV computed with one version is reused only with that version."""

    name: str
    """Name by which requests choose the adapter."""
    digest: bytes
    """32-byte digest of its content (`weights.adapters`); it changes when the adapter is replaced."""


def new_incarnation() -> Incarnation:
    """Generate a random incarnation, unique with overwhelming probability."""
    return Incarnation(secrets.token_hex(8))


def new_ticket_id() -> TicketId:
    """Generate a random ticket id. It is not a secret: the ticket's MAC authenticates the ticket."""
    return TicketId(secrets.token_hex(16))


def new_request_id() -> RequestId:
    """Generate a request id for a request without an id."""
    return RequestId(f"req-{secrets.token_hex(12)}")
