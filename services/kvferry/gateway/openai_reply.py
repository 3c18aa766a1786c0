"""OpenAI's responses, as plain structs that msgspec encodes: whole answers, stream chunks, errors."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kvferry.core.errors import KvferryError
from kvferry.core.sampling import SampledToken
from kvferry.rpc.text import TextChunk
from kvferry.rpc.token_source import Timing

_ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    499: "request_cancelled",
    503: "service_unavailable_error",
    504: "timeout_error",
}
encode = msgspec.json.Encoder().encode


class PromptTokensDetails(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class Delta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatMessage(Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class TextChoice(Struct):
    """Of a completion, whole or in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


Choice = ChunkChoice | ChatChoice | TextChoice


class Reply(Struct):
    """What all four kinds of answer have around their choices."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[Choice]
    usage: Usage | UnsetType | None = UNSET
    """In a stream with `include_usage`: null until the last chunk."""
    kvferry: dict[str, Any] | UnsetType = UNSET
    """Where the time of the first choice went: `Timing` of inference.proto."""


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(Struct):
    error: ErrorDetail


class Model(Struct):
    id: str
    created: int
    object: str = "model"
    owned_by: str = "kvferry"
    max_model_len: int = 0
    """As vLLM names it: prompt and output together."""


class ModelList(Struct):
    data: list[Model]
    object: str = "list"


class TokenBytes(Protocol):
    """Spells one token."""

    def __call__(self, token_id: int) -> bytes: ...


def error_body(error: KvferryError) -> bytes:
    """OpenAI's error object."""
    kind = _ERROR_TYPES.get(error.http_status, "server_error")
    return encode(ErrorBody(ErrorDetail(error.message, kind, error.field, error.reason.lower())))


def sse(payload: Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(payload) + b"\n\n"


def kv_line(timing: Timing) -> str:
    """Where the prompt's KV came from, choice by choice, on one line of ASCII: for a debug header."""
    told: list[str] = []
    for r in timing.kv:
        way = "load" if r.num_chosen else "compute"
        told.append(
            f"{r.source} at {r.worker_id}: {way} {r.num_chosen or r.num_tokens} tokens from {r.first_token}, "
            f"expected load {1e3 * r.expected_load_seconds:.1f} ms, compute {1e3 * r.expected_compute_seconds:.1f} ms, "
            f"loaded {r.blocks_loaded} blocks in {1e3 * r.load_seconds:.1f} ms" + (f" ({r.failure})" * bool(r.failure))
        )
    line = "".join(c if c.isascii() and c.isprintable() else "?" for c in "; ".join(told))
    return line or "computed"


def timing_object(timing: Timing) -> dict[str, Any]:
    """`Timing` by its field names."""
    return asdict(timing)


def chat_logprobs(tokens: Sequence[SampledToken], spell: TokenBytes) -> ChatLogprobs | None:
    """Log-probabilities in the form of chat; `None` when none were asked for."""
    if not tokens or tokens[0].logprob is None:
        return None
    content: list[TokenLogprob] = []
    for token in tokens:
        raw = spell(token.token_id)
        top = [TopLogprob(_text(spell(i)), logprob, list(spell(i))) for i, logprob in token.top]
        content.append(TokenLogprob(_text(raw), token.logprob or 0.0, list(raw), top))
    return ChatLogprobs(content)


def completion_logprobs(tokens: Sequence[SampledToken], spell: TokenBytes, offset: int) -> CompletionLogprobs | None:
    """Log-probabilities in the older form; `offset`: characters of the tokens before."""
    if not tokens or tokens[0].logprob is None:
        return None
    texts = [_text(spell(token.token_id)) for token in tokens]
    offsets: list[int] = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    tops = [{_text(spell(i)): logprob for i, logprob in token.top} for token in tokens]
    return CompletionLogprobs(texts, [token.logprob or 0.0 for token in tokens], tops, offsets)


def add_usage(total: Usage | None, chunk: TextChunk, *, first_sample: bool) -> Usage | None:
    """`total` with one ended sample added; a prompt counts once, however many samples it has."""
    if chunk.usage is None:
        return total
    prompt = chunk.usage.prompt_tokens if first_sample else 0
    cached = chunk.usage.cached_tokens if first_sample else 0
    total = total or Usage(0, 0, 0, PromptTokensDetails(0))
    return Usage(
        total.prompt_tokens + prompt,
        total.completion_tokens + chunk.usage.output_tokens,
        total.total_tokens + prompt + chunk.usage.output_tokens,
        PromptTokensDetails(total.prompt_tokens_details.cached_tokens + cached),
    )


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
