"""The ticket: what a prefill worker promises to whoever decodes, sealed so that nobody can alter it.

    sealed ticket = [ magic "kvt1" ][ key id 4 B ][ MAC 32 B ][ body: MessagePack array of the fields below ]

The MAC is keyed BLAKE3 over magic, key id and body. A ticket names pages with their epochs, the peer's
incarnation, the layout, the tenant and a digest of the tokens, so it can serve neither another prompt, nor
another tenant, nor a restarted peer. It carries no secret and no token. The form is fixed by
tests/golden/ticket.json; new fields are appended at the end with a default.
"""

from collections.abc import Sequence
from hmac import compare_digest

import msgspec
from blake3 import blake3

from kvferry.core.errors import TicketRejected
from kvferry.core.ids import Incarnation, TicketId, WorkerId
from kvferry.kv.layout import Description, KvLayout, described
from kvferry.kv.relayout import Relayout, plan

_MAGIC = b"kvt1"
_KEY_CONTEXT = "kvferry 2026-11 ticket key"
_TOKENS_CONTEXT = "kvferry 2026-11 ticket tokens"
_HEADER = len(_MAGIC) + 4 + 32
MAX_TICKET_BYTES = 1 << 20


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=False):
    """One offer of one prompt's pages. A value: renewing or claiming it changes the offer, never the ticket."""

    ticket_id: str
    worker_id: str
    incarnation: str
    control_address: str
    """Where the peer's `KvTransfer` service listens."""
    connector: str
    fingerprint: bytes
    """Of the layout, 16 bytes."""
    tenant: str
    tokens_digest: bytes
    """`digest_tokens` of the tokens whose KV this is."""
    num_tokens: int
    """Positions 0 .. num_tokens-1 are in the pages."""
    block_ids: tuple[int, ...]
    epochs: tuple[int, ...]
    """Of the pages when they were offered."""
    expires_wall: float
    """Seconds since the Unix epoch after which the offer may be gone. A hint: epochs are the proof."""
    held: bool = True
    """Whether the peer keeps the pages under an offer. If not, nothing is claimed and nothing finished: whoever
    reads finds by the epochs whether they were still what the ticket says."""
    readers: int = 1
    """How many may read under the offer, each with its own `reader` number from 0 on."""
    layout: Description = ()
    """What `fingerprint` is the fingerprint of, for readers with another layout; empty: equal ones only."""

    @property
    def id(self) -> TicketId:
        """Typed `ticket_id`."""
        return TicketId(self.ticket_id)

    @property
    def peer(self) -> tuple[WorkerId, Incarnation]:
        """Whose pages these are."""
        return WorkerId(self.worker_id), Incarnation(self.incarnation)


def digest_tokens(tokens: Sequence[int]) -> bytes:
    """16 bytes that bind a ticket to its tokens."""
    packed = b"".join(t.to_bytes(4, "little") for t in tokens)
    return blake3(packed, derive_key_context=_TOKENS_CONTEXT).digest(length=16)


class Keyring:
    """The cluster's ticket keys: the first seals, all of them open, so that keys can be rotated."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        """
        Raises:
            ValueError: no key, or one shorter than 16 bytes.
        """
        if not secrets or min(len(s) for s in secrets) < 16:
            raise ValueError("a keyring needs at least one key, each of at least 16 bytes")
        keys = [blake3(s, derive_key_context=_KEY_CONTEXT).digest() for s in secrets]
        self._keys = {blake3(k).digest(length=4): k for k in keys}
        self._current = blake3(keys[0]).digest(length=4)

    def seal(self, ticket: Ticket) -> bytes:
        """The ticket as bytes that only this keyring's holders could have made."""
        body = msgspec.msgpack.encode(ticket)
        return _MAGIC + self._current + self._mac(self._current, body) + body

    def open(self, sealed: bytes) -> Ticket:
        """The ticket, if it is genuine and well formed.

        Raises:
            TicketRejected: it is not; the reason says how, the message never shows the content.
        """
        if not _HEADER < len(sealed) <= MAX_TICKET_BYTES or sealed[:4] != _MAGIC:
            raise TicketRejected(f"not a ticket ({len(sealed)} bytes)", reason="TICKET_MALFORMED", field="ticket")
        key_id, mac, body = sealed[4:8], sealed[8:_HEADER], sealed[_HEADER:]
        if key_id not in self._keys:
            raise TicketRejected(
                "the ticket was sealed with a key this worker does not have; give both workers the same ticket key",
                reason="TICKET_KEY_UNKNOWN",
                field="ticket",
            )
        if not compare_digest(mac, self._mac(key_id, body)):
            raise TicketRejected("the ticket was altered on its way", reason="TICKET_FORGED", field="ticket")
        try:
            ticket = msgspec.msgpack.decode(body, type=Ticket)
        except msgspec.DecodeError as error:
            raise TicketRejected(
                "the ticket is of a version this worker cannot read", reason="TICKET_MALFORMED", field="ticket"
            ) from error
        if len(ticket.block_ids) != len(ticket.epochs) or ticket.num_tokens < 1 or ticket.readers < 1:
            raise TicketRejected("the ticket contradicts itself", reason="TICKET_MALFORMED", field="ticket")
        return ticket

    def _mac(self, key_id: bytes, body: bytes) -> bytes:
        return blake3(_MAGIC + key_id + body, key=self._keys[key_id]).digest()


def layout_of(fingerprint: bytes, description: Sequence[object], own: KvLayout) -> KvLayout:
    """The layout of somebody whose fingerprint is not ours, if the description that came with it is its own.

    Raises:
        TicketRejected: TICKET_LAYOUT; there is none, or it makes no sense.
    """
    if not description:
        raise _other_layout(fingerprint, own.fingerprint, "and nothing more is said of it")
    try:
        found = described(description)
    except ValueError as error:
        raise _other_layout(fingerprint, own.fingerprint, f"and what is said of it makes none: {error}") from error
    if found.fingerprint != fingerprint:
        raise _other_layout(fingerprint, own.fingerprint, "and what is said of it is of another")
    return found


def plan_for(fingerprint: bytes, description: Sequence[object], own: KvLayout) -> Relayout | None:
    """How to read pages of the layout with this fingerprint and description into ours; `None`: byte for byte.

    Raises:
        TicketRejected: TICKET_LAYOUT; no copy makes ours of it, or what it is was not said.
    """
    if fingerprint == own.fingerprint:
        return None
    return plan(layout_of(fingerprint, description, own), own)


def _other_layout(theirs: bytes, ours: bytes, why: str) -> TicketRejected:
    return TicketRejected(
        f"the KV layout {theirs.hex()} is not this worker's {ours.hex()}, {why}; "
        "give both workers the same model, dtype and block size, or the same version of this program",
        reason="TICKET_LAYOUT",
        field="fingerprint",
    )


def check_ticket(
    ticket: Ticket,
    *,
    fingerprint: bytes,
    block_tokens: int,
    tenant: str,
    tokens: Sequence[int],
    now_wall: float,
    layout: KvLayout | None = None,
) -> None:
    """Whether a genuine ticket fits this request on this worker.

    Args:
        layout: this worker's; with it, a ticket for pages that are held may be of another one if a copy can be planned.

    Raises:
        TicketRejected: it does not; `reason` is one of TICKET_LAYOUT, TICKET_TENANT, TICKET_TOKENS,
            TICKET_EXTENT, TICKET_EXPIRED.
    """

    def reject(reason: str, message: str) -> TicketRejected:
        return TicketRejected(message, reason=reason, field="ticket")

    if ticket.fingerprint != fingerprint:
        if layout is None or not ticket.held:
            raise _other_layout(ticket.fingerprint, fingerprint, "and only equal ones are read like this")
        made = plan_for(ticket.fingerprint, ticket.layout, layout)
        block_tokens = block_tokens if made is None else made.source.block_tokens
    if ticket.tenant != tenant:
        raise reject("TICKET_TENANT", "the ticket belongs to another tenant")
    if not ticket.num_tokens < len(tokens) or len(ticket.block_ids) != -(-ticket.num_tokens // block_tokens):
        raise reject(
            "TICKET_EXTENT",
            f"the ticket covers {ticket.num_tokens} tokens in {len(ticket.block_ids)} blocks; "
            f"the request has {len(tokens)} tokens and at least one must remain to be computed",
        )
    if ticket.tokens_digest != digest_tokens(tokens[: ticket.num_tokens]):
        raise reject("TICKET_TOKENS", "the ticket was made for other tokens")
    if ticket.expires_wall <= now_wall:
        raise reject("TICKET_EXPIRED", f"the offer ran out {now_wall - ticket.expires_wall:.1f} s ago")
