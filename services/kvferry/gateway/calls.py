"""What a sample's trip asks of workers, as messages."""

from kvferry.core.ids import new_ticket_id
from kvferry.gateway.trip import Trip
from kvferry.rpc import wire
from kvferry.v1 import decode_pb2, prefill_pb2


def prefill_request(trip: Trip, earlier: bytes) -> prefill_pb2.PrefillRequest:
    """Compute the prompt, draw a token, offer the blocks under an id drawn here.

    Args:
        earlier: a hint where an earlier turn's blocks may be; empty: none.
    """
    asked = trip.request
    return prefill_pb2.PrefillRequest(
        request_id=asked.request_id,
        token_ids=asked.token_ids,
        sampling=wire.sampling_to_wire(asked.sampling),
        sample_index=asked.sample_index,
        tenant=asked.tenant,
        offer=True,
        ticket_id=new_ticket_id(),
        earlier=earlier,
    )


def decode_request(trip: Trip) -> decode_pb2.DecodeRequest:
    """Generate from the prompt and what was emitted so far; say at the end where the blocks are."""
    asked = trip.request
    return decode_pb2.DecodeRequest(
        request_id=asked.request_id,
        token_ids=trip.token_ids,
        num_generated=len(trip.emitted),
        sampling=wire.sampling_to_wire(asked.sampling),
        sample_index=asked.sample_index,
        tenant=asked.tenant,
        keep=True,
    )
