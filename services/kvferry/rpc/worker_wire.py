"""Converts between domain values and the messages of workers: adapters, loads and outcomes of hand-offs."""

from dataclasses import asdict, fields

from kvferry.core.errors import InvalidRequest
from kvferry.core.handoffs import HandoffOutcome
from kvferry.core.ids import ADAPTER_DIGEST_BYTES, MAX_ADAPTER_NAME_CHARS, AdapterId
from kvferry.core.load import WorkerLoad
from kvferry.v1 import common_pb2, decode_pb2, prefill_pb2, worker_admin_pb2

_HANDOFF_OUTCOMES: dict[int, HandoffOutcome] = {
    decode_pb2.Handoff.OUTCOME_NONE: HandoffOutcome.NONE,
    decode_pb2.Handoff.OUTCOME_FETCHED: HandoffOutcome.FETCHED,
    decode_pb2.Handoff.OUTCOME_LOCAL: HandoffOutcome.LOCAL,
    decode_pb2.Handoff.OUTCOME_TIER: HandoffOutcome.TIER,
    decode_pb2.Handoff.OUTCOME_RECOMPUTED: HandoffOutcome.RECOMPUTED,
    decode_pb2.Handoff.OUTCOME_FAILED: HandoffOutcome.FAILED,
}


def adapter_to_wire(adapter: AdapterId | None) -> common_pb2.Adapter | None:
    """Convert the version of an adapter to a message."""
    return None if adapter is None else common_pb2.Adapter(name=adapter.name, digest=adapter.digest)


def adapter_from_wire(
    message: prefill_pb2.PrefillRequest | decode_pb2.DecodeRequest | worker_admin_pb2.PinPrefixRequest,
) -> AdapterId | None:
    """Return the version of the adapter that a request names; `None` if it names no adapter.

    Raises:
        InvalidRequest: the name or the digest is not valid.
    """
    if not message.HasField("adapter"):
        return None
    found = message.adapter
    if not 0 < len(found.name) <= MAX_ADAPTER_NAME_CHARS:
        raise InvalidRequest(
            f"adapter.name must have 1 to {MAX_ADAPTER_NAME_CHARS} characters, not {len(found.name)}", field="adapter"
        )
    if len(found.digest) != ADAPTER_DIGEST_BYTES:
        raise InvalidRequest(
            f"adapter.digest must have {ADAPTER_DIGEST_BYTES} bytes, not {len(found.digest)}", field="adapter"
        )
    return AdapterId(found.name, found.digest)


def handoff_outcome_from_wire(value: int) -> HandoffOutcome:
    """Convert the outcome of a hand-off; unknown values become `NONE`."""
    return _HANDOFF_OUTCOMES.get(value, HandoffOutcome.NONE)


def load_to_wire(load: WorkerLoad) -> worker_admin_pb2.WorkerLoad:
    """Convert a load to a message; the fields have the same names."""
    return worker_admin_pb2.WorkerLoad(**asdict(load))


def load_from_wire(message: worker_admin_pb2.WorkerLoad) -> WorkerLoad:
    """Convert a message to a `WorkerLoad`."""
    return WorkerLoad(*(getattr(message, name) for name in _LOAD_FIELDS))


_LOAD_FIELDS = tuple(f.name for f in fields(WorkerLoad))
