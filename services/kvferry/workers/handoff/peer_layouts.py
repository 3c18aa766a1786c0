"""Converts KV layouts to messages, and checks whether a peer's layout is compatible with this worker's layout."""

from kvferry.core.errors import TicketRejected
from kvferry.kv.interface.ticket import layout_of, plan_for
from kvferry.kv.pages.layout import VERSION, Description, KvLayout
from kvferry.kv.pages.relayout import plan
from kvferry.v1 import common_pb2


def layout_to_wire(layout: KvLayout) -> common_pb2.KvLayout:
    """Convert a layout to a message; the message is empty for a layout that is never converted."""
    if layout.windows:
        return common_pb2.KvLayout()
    return common_pb2.KvLayout(
        model_digest=layout.model_digest,
        dtype=layout.dtype,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_tokens=layout.block_tokens,
        first_kv_head=layout.first_kv_head,
        total_kv_heads=layout.total_kv_heads or 0,
        version=VERSION,
        planes=0 if layout.planes == 2 else layout.planes,
    )


def check_peer_pages(fingerprint: bytes, layout: common_pb2.KvLayout, mine: KvLayout) -> None:
    """Check that this worker can read pages of a peer with the given layout.

    Args:
        fingerprint: fingerprint of the peer's layout.
        layout: description of the peer's layout; empty if it sent none.
        mine: layout of this worker.

    Raises:
        TicketRejected: with reason TICKET_LAYOUT; `field` is the layout field that differs.
    """
    plan_for(fingerprint, _description(layout), mine)


def check_reader(fingerprint: bytes, layout: common_pb2.KvLayout, mine: KvLayout) -> None:
    """Check that a reader with the given layout can read this worker's pages.

    Args:
        fingerprint: fingerprint of the reader's layout.
        layout: description of the reader's layout; empty if it sent none.
        mine: layout of this worker.

    Raises:
        TicketRejected: with reason TICKET_LAYOUT; `field` is the layout field that differs.
    """
    if fingerprint != mine.fingerprint:
        plan(mine, layout_of(fingerprint, _description(layout), mine))


def check_equal(fingerprint: bytes, mine: KvLayout) -> None:
    """Check that a reader's layout equals this worker's layout, which KV prefetches require.

    Raises:
        TicketRejected: the layouts differ.
    """
    if fingerprint != mine.fingerprint:
        raise TicketRejected(
            f"KV layouts differ: this worker's is {mine.fingerprint.hex()}, the reader's {fingerprint.hex()}; "
            "a KV prefetch needs equal layouts",
            reason="TICKET_LAYOUT",
            field="fingerprint",
        )


def _description(layout: common_pb2.KvLayout) -> Description:
    """Convert a message to the input of `kv.pages.layout.described`; return an empty tuple for an unset message."""
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
    heads = (layout.first_kv_head, layout.total_kv_heads) if layout.total_kv_heads else ()
    return (*whole, *heads, *((layout.planes,) if layout.planes else ()))
