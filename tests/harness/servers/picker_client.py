"""A client of the external processing service, as a proxy is one."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kvferry.v1 import ext_proc_pb2 as pb
from kvferry.v1.ext_proc_pb2_grpc import ExternalProcessorStub

Call = grpc.aio.StreamStreamCall[pb.ProcessingRequest, pb.ProcessingResponse]


class PickerStub:
    """Calls one picker."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = ExternalProcessorStub(channel)

    def open(self) -> Call:
        """Begin a stream whose messages are written one by one."""
        process: Any = self._stub.Process  # the type stubs lack this form
        call: Call = process()
        return call


@asynccontextmanager
async def picker_stub(address: str) -> AsyncIterator[PickerStub]:
    """Yield a stub for the picker at `address`, without TLS."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield PickerStub(channel)


def head_message(
    headers: Mapping[str, str] | None = None,
    *,
    is_end: bool = False,
    mode: int | None = 4,
    subset: Sequence[str] | str | None = None,
) -> pb.ProcessingRequest:
    """Return the headers of a request.

    Args:
        headers: further headers.
        is_end: whether the request has no body.
        mode: mode of the body that the proxy reports; `None` for a proxy that reports none.
        subset: entries of the subset in the metadata.
    """
    message = pb.ProcessingRequest()
    for key, value in {":method": "POST", ":path": "/v1/completions", **(headers or {})}.items():
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    message.request_headers.end_of_stream = is_end
    if mode is not None:
        message.protocol_config.request_body_mode = mode
    if subset is not None:
        fields = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        fields["x-gateway-destination-endpoint-subset"] = subset if isinstance(subset, str) else list(subset)
    return message


def body_message(data: bytes, *, is_end: bool = True) -> pb.ProcessingRequest:
    """Return a part of a request's body."""
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=is_end))


def response_message(status: int = 200, served: str = "", *, is_end: bool = True) -> pb.ProcessingRequest:
    """Return the headers of a response, with the endpoint that served it."""
    message = pb.ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=str(status).encode())
    message.response_headers.end_of_stream = is_end
    if served:
        message.metadata_context.filter_metadata["envoy.lb"]["x-gateway-destination-endpoint-served"] = served
    return message


async def read(call: Call) -> pb.ProcessingResponse:
    """Return the next response; fail at the end of the stream."""
    found = await call.read()
    assert isinstance(found, pb.ProcessingResponse), found
    return found


def headers_of(response: pb.ProcessingResponse) -> dict[str, str]:
    """Return the headers that a response sets."""
    kind = response.WhichOneof("response")
    assert kind in ("request_headers", "request_body"), response
    mutation = getattr(response, kind).response.header_mutation
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}


def destination(response: pb.ProcessingResponse) -> str:
    """Return the endpoint in the header; the metadata must have the same."""
    header = headers_of(response)["x-gateway-destination-endpoint"]
    metadata = response.dynamic_metadata.fields["envoy.lb"].struct_value.fields
    assert metadata["x-gateway-destination-endpoint"].string_value == header
    return header
