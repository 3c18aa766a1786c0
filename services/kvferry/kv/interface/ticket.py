"""Ticket of a hand-off: a reference to pages that a prefill worker offers to decode workers, sealed with a MAC.

    sealed ticket = [ magic "kvt1" ][ key id 4 B ][ MAC 32 B ][ body: MessagePack array of the fields below ]

The MAC is keyed BLAKE3 over magic, key id and body. A ticket has the page ids with their epochs, the peer's
incarnation, the layout, the tenant and a digest of the tokens, so it is not valid for a different prompt, a different
tenant or a restarted peer. It contains neither secrets nor tokens. The encoding is fixed by tests/golden/ticket.json;
new fields are appended at the end with a default.
"""

from collections.abc import Sequence
from hmac import compare_digest

import msgspec
from blake3 import blake3

from kvferry.core.errors import TicketRejected
from kvferry.core.ids import Incarnation, TicketId, WorkerId
from kvferry.core.process.struct_types import describe
from kvferry.kv.interface.packed import unpacked
from kvferry.kv.interface.seals import Sealed, sealed_bytes
from kvferry.kv.pages.layer_groups import FULL_ATTENTION, handed_over
from kvferry.kv.pages.layout import Description, KvLayout, described
from kvferry.kv.pages.relayout import Relayout, plan

_MAGIC = b"kvt1"
_SEAL = b"kvs1"
"""Purpose of the MACs of seals, so that a seal's MAC is never valid as a ticket's MAC."""
_KEY_CONTEXT = "kvferry 2026-11 ticket key"
_TOKENS_CONTEXT = "kvferry 2026-11 ticket tokens"
_HEADER = len(_MAGIC) + 4 + 32
MAX_TICKET_BYTES = 1 << 20


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=False):
    """Reference to the pages of one prompt. Immutable: claims and renewals change the offer, never the ticket."""

    ticket_id: str
    worker_id: str
    incarnation: str
    control_address: str
    """Address of the peer's `KvTransfer` service."""
    connector: str
    fingerprint: bytes
    """Fingerprint of the layout, 16 bytes."""
    scope: str
    """Cache scope of the prompt: tenant, salt and adapter."""
    tokens_digest: bytes
    """`digest_tokens` of the tokens whose KV is in the pages."""
    num_tokens: int
    """Number of tokens whose KV is in the pages: positions 0 .. num_tokens-1."""
    block_ids: tuple[int, ...]
    """Pages of the blocks in order; with layer groups, in the order of `layer_groups.handed_over`."""
    epochs: tuple[int, ...]
    """Epochs of the pages at the time of the offer."""
    expires_wall: float
    """Time after which the offer may no longer exist, in seconds since the Unix epoch. It is a hint; epochs verify the
    content."""
    held: bool = True
    """Whether the peer holds the pages under an offer. If not, the reader sends neither claim nor finish, and only the
    epochs show whether the pages still had the expected content."""
    readers: int = 1
    """Number of readers of the offer, indexed from 0."""
    layout: Description = ()
    """Description of the layout, for readers with a different layout; if empty, only equal layouts can read."""
    digests: tuple[bytes, ...] = ()
    """`page_digests` of the pages at the time of the offer; empty if the peer does not compute digests."""

    @property
    def id(self) -> TicketId:
        """Value of `ticket_id` as a `TicketId`."""
        return TicketId(self.ticket_id)

    @property
    def peer(self) -> tuple[WorkerId, Incarnation]:
        """Worker id and incarnation of the worker that owns the pages."""
        return WorkerId(self.worker_id), Incarnation(self.incarnation)


describe(Ticket)


def digest_tokens(tokens: Sequence[int]) -> bytes:
    """Compute the 16-byte digest that binds a ticket to its tokens."""
    packed = b"".join(t.to_bytes(4, "little") for t in tokens)
    return blake3(packed, derive_key_context=_TOKENS_CONTEXT).digest(length=16)


class Keyring:
    """Ticket keys of the pool. The first key seals tickets and every key opens them, so that keys can be rotated."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        """
        Raises:
            ValueError: `secrets` is empty, or a key is shorter than 16 bytes.
        """
        if not secrets or min(len(s) for s in secrets) < 16:
            lengths = ", ".join(str(len(s)) for s in secrets)
            raise ValueError(f"a keyring needs keys of at least 16 bytes, not {lengths or 'an empty list'}")
        keys = [blake3(s, derive_key_context=_KEY_CONTEXT).digest() for s in secrets]
        self._keys = {blake3(k).digest(length=4): k for k in keys}
        self._current = blake3(keys[0]).digest(length=4)

    def seal(self, ticket: Ticket) -> bytes:
        """Encode the ticket with its MAC."""
        body = msgspec.msgpack.encode(ticket)
        return _MAGIC + self._current + self._mac(self._current, body) + body

    def open(self, sealed: bytes) -> Ticket:
        """Verify the MAC and decode the ticket.

        Raises:
            TicketRejected: the ticket is malformed, forged, or sealed with an unknown key; the message does not show
                the ticket's content.
        """
        if not _HEADER < len(sealed) <= MAX_TICKET_BYTES or sealed[:4] != _MAGIC:
            raise TicketRejected(
                f"these {len(sealed)} bytes are not a ticket of this version; send the ticket as the prefill worker "
                "returned it",
                reason="TICKET_MALFORMED",
                field="ticket",
            )
        key_id, mac, body = sealed[4:8], sealed[8:_HEADER], sealed[_HEADER:]
        if key_id not in self._keys:
            raise TicketRejected(
                "the ticket was sealed with a key this worker does not have; use the same ticket key on both workers",
                reason="TICKET_KEY_UNKNOWN",
                field="ticket",
            )
        if not compare_digest(mac, self._mac(key_id, body)):
            raise TicketRejected("the ticket was altered in transit", reason="TICKET_FORGED", field="ticket")
        try:
            ticket = unpacked(body, Ticket)
        except msgspec.DecodeError as error:
            raise TicketRejected(
                "the ticket has a version that this worker cannot read", reason="TICKET_MALFORMED", field="ticket"
            ) from error
        if (
            not len(ticket.block_ids) == len(ticket.epochs) == len(ticket.digests or ticket.epochs)
            or ticket.num_tokens < 1
            or ticket.readers < 1
        ):
            raise TicketRejected(
                f"the ticket is inconsistent: {len(ticket.block_ids)} pages, {len(ticket.epochs)} epochs, "
                f"{len(ticket.digests)} digests, {ticket.num_tokens} tokens, {ticket.readers} readers",
                reason="TICKET_MALFORMED",
                field="ticket",
            )
        return ticket

    def sign(self, sealed: Sealed) -> bytes:
        """Create the seal of a message to another worker."""
        return self._current + self._mac(self._current, sealed_bytes(sealed), _SEAL)

    def check(self, sealed: Sealed, seal: bytes) -> None:
        """Check that a worker of the pool has made `seal` for exactly these fields.

        Args:
            sealed: the fields.
            seal: key id and authentication code, as received.

        Raises:
            TicketRejected: SEAL_INVALID; the seal is missing, or made with an unknown key or for other fields.
        """
        key_id, mac = seal[:4], seal[4:]
        if key_id not in self._keys or not compare_digest(mac, self._mac(key_id, sealed_bytes(sealed), _SEAL)):
            raise TicketRejected(
                "the peer's message is not sealed with the pool's ticket key; use the same ticket key on all workers",
                reason="SEAL_INVALID",
                field="seal",
            )

    def _mac(self, key_id: bytes, body: bytes, purpose: bytes = _MAGIC) -> bytes:
        return blake3(purpose + key_id + body, key=self._keys[key_id]).digest()


def layout_of(fingerprint: bytes, description: Sequence[object], own: KvLayout) -> KvLayout:
    """Parse the layout of a peer whose fingerprint differs from this worker's, and check it against the fingerprint.

    Args:
        fingerprint: fingerprint that the peer has sent.
        description: description that the peer has sent; empty if it sent none.
        own: layout of this worker.

    Raises:
        TicketRejected: TICKET_LAYOUT; the description is missing, invalid, or does not match the fingerprint.
    """
    if not description:
        raise _other_layout(fingerprint, own.fingerprint, "and the peer sent no description of it")
    try:
        found = described(description)
    except ValueError as error:
        raise _other_layout(fingerprint, own.fingerprint, f"and its description is invalid: {error}") from error
    if found.fingerprint != fingerprint:
        raise _other_layout(fingerprint, own.fingerprint, "and its description does not match its fingerprint")
    return found


def plan_for(fingerprint: bytes, description: Sequence[object], own: KvLayout) -> Relayout | None:
    """Plan the conversion of a peer's pages into this worker's layout; return `None` if the layouts are equal (byte
    copy).

    Args:
        fingerprint: fingerprint that the peer has sent.
        description: description that the peer has sent; empty if it sent none.
        own: layout of this worker.

    Raises:
        TicketRejected: TICKET_LAYOUT; the pages cannot be converted, or the description is missing or invalid.
    """
    if fingerprint == own.fingerprint:
        return None
    return plan(layout_of(fingerprint, description, own), own)


def _other_layout(theirs: bytes, ours: bytes, why: str) -> TicketRejected:
    return TicketRejected(
        f"the KV layout {theirs.hex()} differs from this worker's {ours.hex()}, {why}; use the same model, dtype, "
        "block size and kvferry version on both workers",
        reason="TICKET_LAYOUT",
        field="fingerprint",
    )


def check_ticket(
    ticket: Ticket,
    *,
    fingerprint: bytes,
    block_tokens: int,
    scope: str,
    tokens: Sequence[int],
    now_wall: float,
    layout: KvLayout | None = None,
    windows: Sequence[int | None] = FULL_ATTENTION,
) -> None:
    """Check that an opened ticket is valid for a request on this worker.

    Args:
        ticket: the opened ticket.
        fingerprint: fingerprint of this worker's layout.
        block_tokens: tokens per page of this worker.
        scope: cache scope of the request.
        tokens: tokens of the request.
        now_wall: wall-clock time in seconds, which is compared with the ticket's expiry.
        layout: this worker's layout; if given, a ticket for held pages may have a different, convertible layout.
        windows: sliding windows of this worker's layer groups.

    Raises:
        TicketRejected: the ticket is not valid; `reason` is one of TICKET_LAYOUT, TICKET_SCOPE, TICKET_TOKENS,
            TICKET_EXTENT, TICKET_EXPIRED.
    """

    def reject(reason: str, message: str) -> TicketRejected:
        return TicketRejected(message, reason=reason, field="ticket")

    if ticket.fingerprint != fingerprint:
        if layout is None or not ticket.held:
            raise _other_layout(ticket.fingerprint, fingerprint, "and this kind of ticket needs equal layouts")
        made = plan_for(ticket.fingerprint, ticket.layout, layout)
        block_tokens = block_tokens if made is None else made.source.block_tokens
    num_pages = sum(map(len, handed_over(ticket.num_tokens, windows, block_tokens)))
    if ticket.scope != scope:
        raise reject("TICKET_SCOPE", "the ticket belongs to another cache scope")
    if not ticket.num_tokens < len(tokens) or len(ticket.block_ids) != num_pages:
        raise reject(
            "TICKET_EXTENT",
            f"the ticket covers {ticket.num_tokens} tokens in {len(ticket.block_ids)} pages, of which {num_pages} are "
            f"needed; "
            f"the request has {len(tokens)} tokens and at least one must remain to be computed",
        )
    if ticket.tokens_digest != digest_tokens(tokens[: ticket.num_tokens]):
        raise reject("TICKET_TOKENS", "the ticket is for a different prompt: its tokens_digest does not match")
    if ticket.expires_wall <= now_wall:
        raise reject("TICKET_EXPIRED", f"the offer expired {now_wall - ticket.expires_wall:.1f} s ago")
