import grpc
import pytest

from kvferry.core import errors
from kvferry.rpc.errors import MAX_MESSAGE_CHARS, error_from_rpc, status_of

_KINDS = [kind for kind in errors.KvferryError.__subclasses__() if kind.__module__ == errors.__name__]


def over_the_wire(error: errors.KvferryError) -> errors.KvferryError:
    code, message, trailers = status_of(error)
    return error_from_rpc(
        grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details=message)
    )


@pytest.mark.parametrize("kind", _KINDS)
def test_every_error_keeps_its_class_over_grpc(kind):
    received = over_the_wire(kind("no room", field="n", retry_after_seconds=2.25))
    assert type(received) is kind
    assert (received.message, received.field, received.retry_after_seconds) == ("no room", "n", 2.25)
    assert received.reason == kind.reason


def test_a_reason_is_preserved_over_grpc():
    assert over_the_wire(errors.Unavailable("x", reason="NO_DECODE_REPLICA")).reason == "NO_DECODE_REPLICA"


def test_a_status_without_details_gets_no_invented_fields():
    received = over_the_wire(errors.Unavailable("x"))
    assert (received.field, received.retry_after_seconds) == (None, None)


def test_a_status_without_details_keeps_code_and_message():
    bare = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details="connection refused"
    )
    received = error_from_rpc(bare)
    assert isinstance(received, errors.Unavailable)
    assert received.message == "connection refused"


def test_garbage_in_the_details_does_not_hide_the_error():
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff\xff"))
    bare = grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), trailers, details="which?")
    assert isinstance(error_from_rpc(bare), errors.UnknownModel)


def test_a_status_that_we_never_send_is_an_internal_error():
    bare = grpc.aio.AioRpcError(grpc.StatusCode.DATA_LOSS, grpc.aio.Metadata(), grpc.aio.Metadata(), details=None)
    assert isinstance(error_from_rpc(bare), errors.InvariantBroken)


def test_a_long_message_fits_the_headers():
    assert len(over_the_wire(errors.InvalidRequest("é" * 100_000)).message) == MAX_MESSAGE_CHARS
