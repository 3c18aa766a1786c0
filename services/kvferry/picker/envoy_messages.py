"""Converts between Envoy's messages and those of an exchange."""

from collections.abc import Mapping

import msgspec

from kvferry.picker.decide import headers as names
from kvferry.picker.decide.exchange import (
    BodyMode,
    Incoming,
    MessageKind,
    ProxyReply,
    Refusal,
    Refuse,
    RequestHead,
    RequestPart,
    RequestTrailers,
    ResponseHead,
    ResponsePart,
    ResponseTrailers,
)
from kvferry.v1 import ext_proc_pb2 as pb

MAX_HEADERS = 1024
_OVERWRITE = 2
_CONTINUE = {
    MessageKind.REQUEST_HEAD: pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=pb.CommonResponse())),
    MessageKind.REQUEST_BODY: pb.ProcessingResponse(request_body=pb.BodyResponse(response=pb.CommonResponse())),
    MessageKind.REQUEST_TRAILERS: pb.ProcessingResponse(request_trailers=pb.TrailersResponse()),
    MessageKind.RESPONSE_HEAD: pb.ProcessingResponse(response_headers=pb.HeadersResponse(response=pb.CommonResponse())),
    MessageKind.RESPONSE_BODY: pb.ProcessingResponse(response_body=pb.BodyResponse(response=pb.CommonResponse())),
    MessageKind.RESPONSE_TRAILERS: pb.ProcessingResponse(response_trailers=pb.TrailersResponse()),
}
"""Responses that change nothing, by the message that they answer; never changed."""
_MODES = frozenset(mode.value for mode in BodyMode)


def incoming(message: pb.ProcessingRequest, mode: BodyMode | None) -> Incoming | None:
    """Return the message of an exchange; `None` for a kind that this version does not support.

    Args:
        message: a message of the proxy.
        mode: mode of the request's body, if it is fixed by a setting.
    """
    match message.WhichOneof("request"):
        case "request_headers":
            return _request_head(message, mode)
        case "request_body":
            return RequestPart(message.request_body.body, message.request_body.end_of_stream)
        case "request_trailers":
            return RequestTrailers()
        case "response_headers":
            return _response_head(message)
        case "response_body":
            return ResponsePart(message.response_body.body, message.response_body.end_of_stream)
        case "response_trailers":
            return ResponseTrailers()
        case _:
            return None


def _request_head(message: pb.ProcessingRequest, mode: BodyMode | None) -> RequestHead:
    found = _headers(message.request_headers.headers)
    config = message.protocol_config
    told = message.HasField("protocol_config")
    return RequestHead(
        headers=found,
        is_end=message.request_headers.end_of_stream,
        request_mode=mode if mode is not None else _mode(config.request_body_mode, told, BodyMode.FULL_DUPLEX),
        response_mode=_mode(config.response_body_mode, told, BodyMode.FULL_DUPLEX),
        subset=_subset(message, found),
    )


def _mode(value: int, told: bool, default: BodyMode) -> BodyMode:
    return BodyMode(value) if told and value in _MODES else default


def _headers(given: pb.HeaderMap) -> Mapping[str, str]:
    """Return the headers by lower-case name; of a repeated one, the values with commas."""
    found: dict[str, str] = {}
    for header in given.headers[:MAX_HEADERS]:
        value = header.raw_value.decode("utf-8", "replace") if header.raw_value else header.value
        key = header.key.lower()
        found[key] = f"{found[key]},{value}" if key in found else value
    return found


def _subset(message: pb.ProcessingRequest, headers: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the subset in the metadata, or else in the header; `None` if neither has one."""
    context = message.metadata_context.filter_metadata
    if names.SUBSET_NAMESPACE in context and names.SUBSET in context[names.SUBSET_NAMESPACE].fields:
        value = context[names.SUBSET_NAMESPACE].fields[names.SUBSET]
        if value.WhichOneof("kind") == "list_value":
            entries = (entry.string_value for entry in value.list_value.values[: names.MAX_SUBSET])
            return names.endpoint_list(",".join(entries))
        return names.endpoint_list(value.string_value)
    return names.endpoint_list(headers[names.SUBSET]) if names.SUBSET in headers else None


def _response_head(message: pb.ProcessingRequest) -> ResponseHead:
    found = _headers(message.response_headers.headers)
    status = found.get(":status", "")
    context = message.metadata_context.filter_metadata
    served = ""
    if names.DESTINATION_NAMESPACE in context and names.SERVED in context[names.DESTINATION_NAMESPACE].fields:
        served = context[names.DESTINATION_NAMESPACE].fields[names.SERVED].string_value
    return ResponseHead(
        status=int(status) if status.isdecimal() and len(status) == 3 else 0,
        served=served,
        is_end=message.response_headers.end_of_stream,
    )


def reply(outgoing: ProxyReply, prefill_header: str) -> pb.ProcessingResponse:
    """Return the response for a reply.

    Args:
        outgoing: the reply.
        prefill_header: header that names the prefill endpoint.
    """
    if outgoing.route is None and outgoing.echo is None:
        return _CONTINUE[outgoing.part]
    response = pb.ProcessingResponse()
    common = getattr(response, outgoing.part.value).response
    if outgoing.echo is not None:
        streamed = common.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = outgoing.echo, outgoing.is_end
    if outgoing.route is not None:
        value = ",".join(outgoing.route.endpoints)
        mutation = common.header_mutation
        _set(mutation, names.DESTINATION, value)
        if outgoing.route.prefill:
            _set(mutation, prefill_header, outgoing.route.prefill)
        else:
            # A client must not choose which host a sidecar of the model server connects to.
            mutation.remove_headers.append(prefill_header)
        mutation.remove_headers.extend(names.REMOVED)
        common.clear_route_cache = True
        metadata = response.dynamic_metadata.fields[names.DESTINATION_NAMESPACE].struct_value
        metadata.fields[names.DESTINATION].string_value = value
    return response


def refusal(outgoing: Refuse) -> pb.ProcessingResponse:
    """Return the response that the proxy sends to the client in place of a model server's: an error of OpenAI's API."""
    refused = outgoing.refusal
    response = pb.ProcessingResponse()
    immediate = response.immediate_response
    immediate.status.code = refused.status
    immediate.body = _error_body(refused)
    immediate.details = refused.reason
    _set(immediate.headers, "content-type", "application/json")
    if refused.retry_after_seconds is not None:
        _set(immediate.headers, "retry-after", str(max(1, round(refused.retry_after_seconds))))
    return response


def _error_body(refused: Refusal) -> bytes:
    kind = "rate_limit_error" if refused.status == 429 else "server_error"
    error = {"message": refused.message, "type": kind, "param": None, "code": refused.reason}
    return msgspec.json.encode({"error": error})


def _set(mutation: pb.HeaderMutation, key: str, value: str) -> None:
    option = mutation.set_headers.add()
    option.header.key, option.header.raw_value = key, value.encode()
    option.append_action = _OVERWRITE
