"""Messages, the events of their streams and errors, as structs that msgspec encodes."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from kvferry.core.errors import KvferryError
from kvferry.core.inference.chunks import Timing
from kvferry.gateway.http.openai.reply import encode
from kvferry.rpc.errors import MAX_MESSAGE_CHARS

SIGNATURE = "kvferry"
"""The signature of all reasoning: clients require one and send it back; it is not checked."""
_ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Types of errors by HTTP status; other statuses are `invalid_request_error` below 500, and `api_error` from 500 on."""


class Text(Struct, tag="text"):
    """Text of an answer."""

    text: str
    citations: None = None


class ThinkingOutput(Struct, tag="thinking"):
    """The model's reasoning."""

    thinking: str
    signature: str


class ToolUseOutput(Struct, tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


Content = Text | ThinkingOutput | ToolUseOutput


class OutputDetails(Struct):
    thinking_tokens: int


class MessageUsage(Struct):
    """Token counts. The prompt has `input_tokens`, `cache_read_input_tokens` and `cache_creation_input_tokens`
    together."""

    input_tokens: int
    """Number of tokens of the prompt that were neither read from a cache nor put in one."""
    cache_read_input_tokens: int
    """Number of tokens whose KV was in a prefix cache or loaded from a tier or another worker."""
    cache_creation_input_tokens: int
    """Number of tokens whose KV was computed and put in a prefix cache."""
    output_tokens: int
    output_tokens_details: OutputDetails


class AnswerMessage(Struct):
    """An answer, whole or at the start of a stream."""

    id: str
    model: str
    content: Sequence[Content]
    usage: MessageUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    role: str = "assistant"
    type: str = "message"
    kvferry: Timing | UnsetType = UNSET
    """Timing; set in a whole answer."""


class TokenCount(Struct):
    """Response of POST /v1/messages/count_tokens."""

    input_tokens: int


class TextAdded(Struct, tag="text_delta"):
    text: str


class ThinkingAdded(Struct, tag="thinking_delta"):
    thinking: str


class SignatureAdded(Struct, tag="signature_delta"):
    signature: str


class InputAdded(Struct, tag="input_json_delta"):
    partial_json: str


Delta = TextAdded | ThinkingAdded | SignatureAdded | InputAdded


class MessageEnd(Struct):
    """Why an answer ended."""

    stop_reason: str
    stop_sequence: str | None


class MessageStart(Struct, tag="message_start"):
    message: AnswerMessage


class BlockStart(Struct, tag="content_block_start"):
    index: int
    content_block: Content


class BlockDelta(Struct, tag="content_block_delta"):
    index: int
    delta: Delta


class BlockStop(Struct, tag="content_block_stop"):
    index: int


class MessageDelta(Struct, tag="message_delta"):
    delta: MessageEnd
    usage: MessageUsage
    kvferry: Timing | UnsetType = UNSET


class MessageStop(Struct, tag="message_stop"):
    pass


class MessageErrorDetails(Struct):
    """What programs read of an error."""

    error_code: str
    """The error's reason, as `code` in OpenAI's errors."""


class MessageError(Struct):
    """An error; `type` is one of Anthropic's."""

    type: str
    message: str
    details: MessageErrorDetails


class MessageFailed(Struct, tag="error"):
    """The last event of a stream that failed."""

    error: MessageError
    request_id: str


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessageFailed


class MessageErrorBody(Struct):
    """Body of an error."""

    error: MessageError
    request_id: str
    type: str = "error"


def error_body(error: KvferryError, request_id: str) -> bytes:
    """Encode `error` as Anthropic's error object."""
    return encode(MessageErrorBody(_error(error), request_id))


def error_event(error: KvferryError, request_id: str) -> bytes:
    """Encode `error` as the last event of a stream."""
    return sse(MessageFailed(_error(error), request_id))


def sse(event: Event) -> bytes:
    """Encode an event as a server-sent event."""
    return f"event: {type(event).__struct_config__.tag}\ndata: ".encode() + encode(event) + b"\n\n"


def _error(error: KvferryError) -> MessageError:
    kind = _ERROR_TYPES.get(error.http_status, "invalid_request_error" if error.http_status < 500 else "api_error")
    return MessageError(kind, error.message[:MAX_MESSAGE_CHARS], MessageErrorDetails(error.reason.lower()))
