"""OpenAI's responses as structs that msgspec encodes: whole responses, stream chunks, errors."""

import codecs
from collections.abc import Collection, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kvferry.core.errors import KvferryError
from kvferry.core.inference.chunks import StopReason, TextChunk, Timing
from kvferry.core.inference.tool_calls import CallDelta, ToolCall
from kvferry.core.pausing import VersionRuns
from kvferry.core.sampling import SampledToken, ScoredToken
from kvferry.gateway.http.fields.custom_tools import input_of
from kvferry.rpc.errors import MAX_MESSAGE_CHARS

_ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    412: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    499: "request_cancelled",
    503: "service_unavailable_error",
    504: "timeout_error",
}
encode = msgspec.json.Encoder().encode
L = TypeVar("L", "ChatLogprobs", "CompletionLogprobs")


class PromptTokensDetails(Struct):
    cached_tokens: int
    """Number of tokens whose KV was in a prefix cache or loaded from a tier or another worker."""
    cache_write_tokens: int
    """Number of tokens whose KV was computed and put in a prefix cache (`CompletionUsage` in openai 3.54)."""


class CompletionTokensDetails(Struct):
    reasoning_tokens: int
    """Number of output tokens of the reasoning, with its marks; also if the response leaves the reasoning out."""


class UsageObject(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    """Absent before the end of a stream, as is the next field."""
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


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
    """Text of each token, or `bytes:\\xe6` with its bytes if a character is split over several tokens."""
    token_logprobs: list[float | None]
    """Log-probability of each token; null for the first token of an echoed prompt."""
    top_logprobs: list[dict[str, float] | None]
    """The most likely tokens at the position of each token, and the token itself."""
    text_offset: list[int]
    """Index in the text of the first character that each token contributes to."""


class PromptLogprob(Struct):
    """Log-probability of one token at the position of a token of the prompt; named as in vLLM."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Log-probabilities of each token of a prompt and of its alternatives, by token id; null for the first token."""


class FunctionDelta(Struct, omit_defaults=True):
    """A call's name, in its first delta, and its arguments as JSON text."""

    arguments: str
    name: str | None = None


class CustomDelta(Struct, omit_defaults=True):
    """The custom tool of a call; its name is in the first part of a stream."""

    input: str
    name: str | None = None


class ToolCallDelta(Struct, omit_defaults=True):
    """A part of a call; the first part has id, type and name."""

    index: int
    function: FunctionDelta | None = None
    custom: CustomDelta | None = None
    id: str | None = None
    type: str | None = None


class ToolCallObject(Struct, tag="function"):
    """A call of a function in a whole response."""

    id: str
    function: FunctionDelta


class CustomCallObject(Struct, tag="custom"):
    """A call of a custom tool in a whole response."""

    id: str
    custom: CustomDelta


class Delta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """Older name of `reasoning`, with the same text."""
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason = None
    token_ids: list[int] | UnsetType = UNSET
    """Ids of the tokens of this chunk, if requested."""
    weight_version: str | UnsetType = UNSET
    """Version of the weights that made the last token, if token ids are requested; with the finish reason."""
    weight_versions: VersionRuns | UnsetType = UNSET
    """The versions with the index of their first token, if several made the tokens."""


class ChatMessage(Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """Older name of `reasoning`, with the same text."""
    tool_calls: Sequence[ToolCallObject | CustomCallObject] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: StopReason = None
    """The stop string or stop token id that ended the text; named as in vLLM."""
    token_ids: list[int] | UnsetType = UNSET
    """Ids of the output's tokens, if requested."""
    weight_version: str | UnsetType = UNSET
    """Version of the weights that made the last token, if token ids are requested; with the finish reason."""
    weight_versions: VersionRuns | UnsetType = UNSET
    """The versions with the index of their first token, if several made the tokens."""


class TextChoice(Struct):
    """A choice of a completion, in a whole response or a stream chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Ids of the prompt's tokens, if requested; in a stream in the choice's first chunk."""
    token_ids: list[int] | UnsetType = UNSET
    """Ids of the output's tokens, in a stream those of this chunk, if requested."""
    weight_version: str | UnsetType = UNSET
    """Version of the weights that made the last token, if token ids are requested; with the finish reason."""
    weight_versions: VersionRuns | UnsetType = UNSET
    """The versions with the index of their first token, if several made the tokens."""


Choice = ChunkChoice | ChatChoice | TextChoice


class TokenChoice(Struct):
    """The tokens of one sample, in a whole response or a stream chunk of /inference/v1/generate."""

    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason = None
    weight_version: str | UnsetType = UNSET
    """Version of the weights that made the last token; with the finish reason."""
    weight_versions: VersionRuns | UnsetType = UNSET
    """The versions with the index of their first token, if several made the tokens."""


def add_versions(choice: Choice | TokenChoice, timing: Timing | None) -> None:
    """Add the versions of the weights that made a choice's tokens, if they are known.

    Args:
        choice: the choice.
        timing: timing of its sample; `None` before the sample's end.
    """
    if timing is not None and (runs := timing.weight_versions):
        choice.weight_version = runs[-1][0]
        if len(runs) > 1:
            choice.weight_versions = runs


C = TypeVar("C")


class Reply(Struct, Generic[C]):
    """Common fields of chat and completion responses and of their stream chunks."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[C]
    usage: UsageObject | UnsetType | None = UNSET
    """Token usage. In streams only if `include_usage` is set; null in all chunks except the last, unless
    `continuous_usage_stats` is set too."""
    kvferry: Timing | UnsetType = UNSET
    """Timing of the first choice."""
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    """Log-probabilities of a conversation's prompt, if requested."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Token ids of a conversation's prompt, if requested; in a stream in its first chunk."""


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(Struct):
    error: ErrorDetail


class ModelObject(Struct):
    id: str
    created: int
    object: str = "model"
    owned_by: str = "kvferry"
    max_model_len: int = 0
    """Context length in tokens, prompt and output; named as in vLLM."""
    parent: str | UnsetType = UNSET
    """The model that an adapter updates."""


class ModelList(Struct):
    data: list[ModelObject]
    object: str = "list"


class TokenBytes(Protocol):
    """Function that returns the bytes of one token."""

    def __call__(self, token_id: int) -> bytes: ...


def call_object(call: ToolCall, custom: Collection[str]) -> ToolCallObject | CustomCallObject:
    """Convert a call of a whole response.

    Args:
        call: the call.
        custom: names of the custom tools.
    """
    if call.name in custom:
        return CustomCallObject(call.call_id, CustomDelta(input_of(call.arguments), call.name))
    return ToolCallObject(call.call_id, FunctionDelta(call.arguments, call.name))


class CallParts:
    """The calls of a stream, in parts. The input of a custom tool is sent as a whole, when the JSON text of the
    function's arguments is complete."""

    def __init__(self, custom: Collection[str]) -> None:
        """
        Args:
            custom: names of the custom tools.
        """
        self._custom = custom
        self._open: tuple[int, list[str]] | None = None
        """Number of a call of a custom tool, and the parts of its arguments so far."""

    def add(self, deltas: Sequence[CallDelta]) -> list[ToolCallDelta]:
        """Convert parts of calls, in order."""
        made: list[ToolCallDelta] = []
        for delta in deltas:
            if delta.name:
                made += self.close()
                if delta.name in self._custom:
                    self._open = delta.index, [delta.arguments]
                    head = CustomDelta("", delta.name)
                    made.append(ToolCallDelta(delta.index, custom=head, id=delta.call_id, type="custom"))
                    continue
                function = FunctionDelta(delta.arguments, delta.name)
                made.append(ToolCallDelta(delta.index, function, id=delta.call_id, type="function"))
            elif self._open is not None:
                self._open[1].append(delta.arguments)
            else:
                made.append(ToolCallDelta(delta.index, FunctionDelta(delta.arguments)))
        return made

    def close(self) -> list[ToolCallDelta]:
        """Return the input of a custom tool whose call has ended, if there is one."""
        if self._open is None:
            return []
        index, arguments = self._open
        self._open = None
        return [ToolCallDelta(index, custom=CustomDelta(input_of("".join(arguments))))]


def error_body(error: KvferryError) -> bytes:
    """Encode `error` as OpenAI's error object."""
    kind = _ERROR_TYPES.get(error.http_status, "server_error")
    return encode(ErrorBody(ErrorDetail(error.message[:MAX_MESSAGE_CHARS], kind, error.field, error.reason.lower())))


def sse(payload: Struct, id_line: bytes = b"") -> bytes:
    """Encode `payload` as one server-sent event.

    Args:
        payload: its data.
        id_line: the line with its id; empty if it has none.
    """
    return id_line + b"data: " + encode(payload) + b"\n\n"


def kv_line(timing: Timing) -> str:
    """Format the source of the prompt's KV as one ASCII line for the debug response header."""
    parts: list[str] = []
    for r in timing.kv:
        choice = "load" if r.num_chosen else "compute"
        parts.append(
            f"{r.source} at {r.worker_id}: {choice} {r.num_chosen or r.num_tokens} tokens from {r.first_token}, "
            f"expected load {1e3 * r.expected_load_seconds:.1f} ms, compute {1e3 * r.expected_compute_seconds:.1f} ms, "
            f"loaded {r.blocks_loaded} blocks in {1e3 * r.load_seconds:.1f} ms" + (f" ({r.failure})" * bool(r.failure))
        )
    line = "".join(c if c.isascii() and c.isprintable() else "?" for c in "; ".join(parts))
    return line or "computed"


def chat_logprobs(tokens: Sequence[SampledToken], spell: TokenBytes) -> ChatLogprobs | None:
    """Return the log-probabilities in the format of chat responses; `None` if the request did not set `logprobs`.

    Args:
        tokens: the tokens of one sample, or of a chunk of it.
        spell: returns the bytes of a token.
    """
    if not tokens or tokens[0].logprob is None:
        return None
    content: list[TokenLogprob] = []
    for token in tokens:
        raw = spell(token.token_id)
        top = [TopLogprob(_text(spell(i)), logprob, list(spell(i))) for i, logprob in token.top]
        content.append(TokenLogprob(_text(raw), token.logprob or 0.0, list(raw), top))
    return ChatLogprobs(content)


class TextOffsets:
    """Positions of tokens in the text that they spell together, also where a character is split over tokens."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def add(self, raw: bytes) -> int:
        """Append a token; return the index of the first character that it contributes to."""
        begin = self._num_chars
        self._num_chars += len(self._decoder.decode(raw))
        return begin


def completion_logprobs(
    tokens: Sequence[SampledToken], spell: TokenBytes, offsets: TextOffsets
) -> CompletionLogprobs | None:
    """Return the log-probabilities in the format of completions; `None` if the request did not set `logprobs`.

    Args:
        tokens: the next tokens of a sample.
        spell: returns the bytes of a token.
        offsets: positions after the tokens before.
    """
    if not tokens or tokens[0].logprob is None:
        return None
    found = CompletionLogprobs([], [], [], [])
    for token in tokens:
        raw, logprob = spell(token.token_id), token.logprob or 0.0
        found.tokens.append(_key(raw))
        found.token_logprobs.append(logprob)
        found.top_logprobs.append({**{_key(spell(i)): value for i, value in token.top}, _key(raw): logprob})
        found.text_offset.append(offsets.add(raw))
    return found


def echoed_logprobs(
    token_ids: Sequence[int], scores: Sequence[ScoredToken], num_top: int, spell: TokenBytes, offsets: TextOffsets
) -> CompletionLogprobs:
    """Return the log-probabilities of an echoed prompt in the format of completions.

    Args:
        token_ids: the prompt.
        scores: its tokens from the second one on.
        num_top: number of alternatives of each token.
        spell: returns the bytes of a token.
        offsets: positions at the start of the text; contains the prompt afterwards.
    """
    found = CompletionLogprobs([], [None], [None], [])
    for token in token_ids:
        raw = spell(token)
        found.tokens.append(_key(raw))
        found.text_offset.append(offsets.add(raw))
    for score in scores:
        top = {_key(spell(i)): logprob for i, logprob in score.top[:num_top]}
        found.token_logprobs.append(score.logprob)
        found.top_logprobs.append({**top, _key(spell(score.token_id)): score.logprob})
    return found


def prompt_logprobs(scores: Sequence[ScoredToken], num_top: int, spell: TokenBytes) -> PromptLogprobs:
    """Return the log-probabilities of a prompt in vLLM's format: each token first, then its `num_top` alternatives.

    Args:
        scores: scores of the prompt's tokens after the first one.
        num_top: maximum number of alternatives of each token.
        spell: returns the bytes of a token.
    """
    found: PromptLogprobs = [None]
    for score in scores:
        ranked = [(score.token_id, score.logprob, score.rank)]
        ranked += [(token, logprob, rank) for rank, (token, logprob) in enumerate(score.top[:num_top], start=1)]
        found.append({str(token): PromptLogprob(value, rank, _text(spell(token))) for token, value, rank in ranked})
    return found


def continued(total: L | None, more: L | None) -> L | None:
    """Append the log-probabilities of later tokens to those of earlier ones, and return all."""
    match total, more:
        case ChatLogprobs(), ChatLogprobs():
            total.content += more.content
        case CompletionLogprobs(), CompletionLogprobs():
            total.tokens += more.tokens
            total.token_logprobs += more.token_logprobs
            total.top_logprobs += more.top_logprobs
            total.text_offset += more.text_offset
        case _:
            return more if total is None else total
    return total


def add_usage(total: UsageObject | None, chunk: TextChunk, *, first_sample: bool) -> UsageObject | None:
    """Return `total` plus the usage of an ended sample, and of the beams that are not returned; the prompt is counted
    only for the first sample.

    Args:
        total: usage so far; `None` if no sample has ended.
        chunk: a chunk of a sample; only its last one has the usage.
        first_sample: whether the sample is the first one of its prompt.
    """
    if chunk.usage is None:
        return total
    prompt = chunk.usage.prompt_tokens if first_sample else 0
    cached = chunk.usage.cached_tokens if first_sample else 0
    written = chunk.usage.cache_write_tokens if first_sample else 0
    output = chunk.usage.output_tokens + chunk.usage.unreturned_tokens
    reasoning = chunk.usage.reasoning_tokens
    if total is not None:
        prompt, output = total.prompt_tokens + prompt, total.completion_tokens + output
        if total.prompt_tokens_details is not UNSET and total.completion_tokens_details is not UNSET:
            cached += total.prompt_tokens_details.cached_tokens
            written += total.prompt_tokens_details.cache_write_tokens
            reasoning += total.completion_tokens_details.reasoning_tokens
    details = PromptTokensDetails(cached, written)
    return UsageObject(prompt, output, prompt + output, details, CompletionTokensDetails(reasoning))


def _key(raw: bytes) -> str:
    """Return the text of a token, or its bytes as in OpenAI's API if it has a part of a character: several tokens would
    have the same text."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
