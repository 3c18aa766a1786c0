"""KV layouts in messages between workers, and whether what a peer says of its own can be worked with."""

from kvferry.core.errors import TicketRejected
from kvferry.kv.layout import VERSION, Description, KvLayout
from kvferry.kv.relayout import plan
from kvferry.kv.ticket import layout_of, plan_for
from kvferry.v1 import common_pb2


def layout_to_wire(layout: KvLayout) -> common_pb2.KvLayout:
    """As a message."""
    return common_pb2.KvLayout(
        model_digest=layout.model_digest,
        dtype=layout.dtype,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_tokens=layout.block_tokens,
        head_start=layout.head_start,
        total_kv_heads=layout.total_kv_heads or 0,
        version=VERSION,
    )


def check_peer_pages(fingerprint: bytes, layout: common_pb2.KvLayout, mine: KvLayout) -> None:
    """Whether this worker can read the pages of a peer with this layout.

    Raises:
        TicketRejected: TICKET_LAYOUT; `field` is the layout's.
    """
    plan_for(fingerprint, _description(layout), mine)


def check_reader(fingerprint: bytes, layout: common_pb2.KvLayout, mine: KvLayout) -> None:
    """Whether a reader with this layout can read this worker's pages.

    Raises:
        TicketRejected: TICKET_LAYOUT; `field` is the layout's.
    """
    if fingerprint != mine.fingerprint:
        plan(mine, layout_of(fingerprint, _description(layout), mine))


def check_equal(fingerprint: bytes, mine: KvLayout) -> None:
    """Whether blocks can be told of by name and page, for which layouts must be equal.

    Raises:
        TicketRejected: they are not.
    """
    if fingerprint != mine.fingerprint:
        raise TicketRejected(
            f"KV layouts differ: mine is {mine.fingerprint.hex()}, the reader's {fingerprint.hex()}; "
            "a head start needs equal ones",
            reason="TICKET_LAYOUT",
            field="fingerprint",
        )


def _description(layout: common_pb2.KvLayout) -> Description:
    """As `kv.layout.described` reads it; of an unset message, nothing."""
    if not layout.version:
        return ()
    whole = (
        layout.version,
        layout.model_digest,
        layout.dtype,
        layout.num_layers,
        layout.num_kv_heads,
        layout.head_dim,
        layout.block_tokens,
    )
    return (*whole, layout.head_start, layout.total_kv_heads) if layout.total_kv_heads else whole
