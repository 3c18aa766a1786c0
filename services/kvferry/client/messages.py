"""Builds the requests and results that both clients use."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from kvferry.core.errors import InvalidRequest, InvariantBroken
from kvferry.core.inference.beams import BeamParams
from kvferry.core.inference.chunks import StopReason, TextChunk, Timing, Usage
from kvferry.core.inference.pooling import PoolingParams
from kvferry.core.inference.tool_calls import AssembledCalls, ToolCall
from kvferry.core.inference.tool_inputs import ToolInput, calls_from_input, content_from_input, use_from_input
from kvferry.core.inference.tools import Tool, ToolMode, ToolUse
from kvferry.core.retention import NO_HINTS, CacheHints
from kvferry.core.sampling import FinishReason, Range, SampledToken, SamplingParams, ScoredToken
from kvferry.rpc import wire
from kvferry.rpc.wire import pooling_to_wire
from kvferry.v1 import common_pb2, inference_pb2

ChatMessage = Mapping[str, object]
"""A message: `role` and `content`; an assistant message may have `tool_calls` (a sequence of `ToolCall`, or of
dictionaries in OpenAI's form) and `reasoning`, and a message of role `tool` has `tool_call_id`."""
Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""Plain text, token ids, or a conversation."""

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """A complete sample: text, tokens, finish reason, usage and timing."""

    index: int
    """Index of the sample, 0 to n - 1."""
    text: str
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    stop_reason: StopReason = None
    """The stop string or stop token id that ended the sample; `None` if neither did."""
    prompt_logprobs: tuple[ScoredToken, ...] | None = None
    """Log-probabilities of the prompt's tokens from the second one on; `None` unless requested."""
    reasoning: str = ""
    """Reasoning before the answer."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls; their results are messages of role `tool` in the next request."""

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the generated tokens."""
        return [token.token_id for token in self.tokens]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model's name, digest, context length and vocabulary."""

    model: str
    digest: str
    max_model_tokens: int
    """Context length in tokens, prompt and output."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def generate_request(
    prompt: Prompt,
    sampling: SamplingParams | None,
    n: int,
    model: str,
    request_id: str,
    use: ToolUse | None = None,
    priority: int = 0,
    cache_salt: str = "",
    beams: BeamParams | None = None,
    chat_template_kwargs: Mapping[str, object] | None = None,
    hints: CacheHints = NO_HINTS,
    max_reasoning_tokens: int | None = None,
) -> inference_pb2.GenerateRequest:
    """Build the message for `Inference.Generate`.

    Args:
        prompt: text, token ids or messages.
        sampling: sampling parameters; `None` selects the defaults of `SamplingParams`.
        n: number of samples, or of outputs of a beam search.
        model: name of the model or adapter; empty for the served model.
        request_id: id of the request; empty for an id chosen by the server.
        use: the tools that are offered; `None` without tools.
        priority: priority of the request; lower numbers come first.
        cache_salt: requests with unequal salts share no KV; empty for the tenant's cache.
        beams: parameters of a beam search; `None` to sample.
        chat_template_kwargs: further variables of the chat template.
        hints: what to ask of the cache.
        max_reasoning_tokens: maximum number of tokens of the reasoning; `None` for no limit.

    Raises:
        InvalidRequest: the prompt is empty, so it is unknown whether it has tokens or messages, or tools are set for a
            prompt that is not a conversation; `n` is out of range; `sampling` and `beams` contradict each other.
    """
    _NUM_SAMPLES.check("n", n)
    request = inference_pb2.GenerateRequest(
        model=model,
        request_id=request_id,
        n=n,
        priority=priority,
        cache_salt=cache_salt,
        retain_seconds=hints.retain_seconds,
        affinity_key=hints.affinity_key,
    )
    if sampling is not None:
        request.sampling.CopyFrom(wire.sampling_to_wire(sampling))
    if beams is not None:
        _add_beams(request, beams, sampling)
    if isinstance(prompt, str):
        request.text = prompt
    elif not prompt:
        raise InvalidRequest("the prompt is empty; pass at least one token or message", field="prompt")
    elif isinstance(prompt[0], int):
        request.tokens.CopyFrom(common_pb2.TokenIds(ids=cast("Sequence[int]", prompt)))
    else:
        request.chat.CopyFrom(chat_to_wire(cast("Sequence[ChatMessage]", prompt), use))
        if chat_template_kwargs:
            request.chat.chat_template_kwargs = _variables(chat_template_kwargs)
    if max_reasoning_tokens is not None:
        if not request.HasField("chat") or not 0 <= max_reasoning_tokens < 1 << 32:
            raise InvalidRequest(
                "max_reasoning_tokens must be a number of tokens, and needs a conversation; pass messages",
                field="max_reasoning_tokens",
            )
        request.chat.max_reasoning_tokens = max_reasoning_tokens
    if chat_template_kwargs and not request.HasField("chat"):
        raise InvalidRequest(
            "chat_template_kwargs needs a conversation; pass messages instead of text or tokens",
            field="chat_template_kwargs",
        )
    if use is not None and use.tools and not request.HasField("chat"):
        raise InvalidRequest("tools need a conversation; pass messages instead of text or tokens", field="tools")
    return request


def _variables(given: Mapping[str, object]) -> str:
    try:
        return json.dumps(given, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"chat_template_kwargs must have values as in JSON: {error}", field="chat_template_kwargs"
        ) from None


def _add_beams(request: inference_pb2.GenerateRequest, beams: BeamParams, sampling: SamplingParams | None) -> None:
    """Set the fields of a beam search. `max_tokens` and `ignore_eos` are fields of both parameters, and of `sampling`
    in the message: `sampling` may leave them out, or repeat the values of `beams`."""
    if not isinstance(beams, BeamParams):
        raise InvalidRequest(f"beams must be a BeamParams, not {type(beams).__name__}", field="beams")
    if sampling is not None and sampling.max_tokens not in (None, beams.max_tokens):
        raise InvalidRequest(
            f"max_tokens is {sampling.max_tokens} in sampling and {beams.max_tokens} in beams; set it in beams only",
            field="max_tokens",
        )
    if sampling is not None and sampling.ignore_eos and not beams.ignore_eos:
        raise InvalidRequest("ignore_eos is true in sampling and false in beams; set it in beams", field="ignore_eos")
    request.sampling.max_tokens, request.sampling.ignore_eos = beams.max_tokens, beams.ignore_eos
    request.beams.width, request.beams.length_penalty = beams.width, beams.length_penalty
    request.beams.stopping = _STOPPING[beams.early_stopping]


_STOPPING = {
    False: inference_pb2.BeamSearch.STOPPING_BEST,
    True: inference_pb2.BeamSearch.STOPPING_FIRST,
    "never": inference_pb2.BeamSearch.STOPPING_NEVER,
}
_NUM_SAMPLES = Range(1, wire.MAX_SAMPLES)
_MODES = {
    ToolMode.AUTO: inference_pb2.ToolChoice.MODE_AUTO,
    ToolMode.NONE: inference_pb2.ToolChoice.MODE_NONE,
    ToolMode.REQUIRED: inference_pb2.ToolChoice.MODE_REQUIRED,
}


def tool_use(
    tools: Sequence[Tool | ToolInput], choice: str | Mapping[str, object], *, is_parallel: bool
) -> ToolUse | None:
    """Return the tools and how they may be used; `None` if there are none.

    Args:
        tools: tools that the model may call.
        choice: `auto`, `none`, `required`, or the name of the tool to call.
        is_parallel: whether an answer may have several calls.

    Raises:
        InvalidRequest: see `ToolUse`.
    """
    if not tools and choice in (ToolMode.AUTO, ToolMode.NONE):
        return None
    return use_from_input(tools, choice, is_parallel=is_parallel)


def chat_to_wire(messages: Sequence[ChatMessage], use: ToolUse | None = None) -> inference_pb2.Chat:
    """Convert a conversation to a `Chat` message.

    Raises:
        InvalidRequest: the content or a call of a message has an unknown form.
    """
    wired = [_message_to_wire(message, f"messages.{number}") for number, message in enumerate(messages)]
    chat = inference_pb2.Chat(messages=wired)
    if use is not None:
        chat.tools.extend(
            inference_pb2.Tool(
                name=tool.name,
                description=tool.description,
                parameters=json.dumps(tool.parameters) if tool.parameters else "",
            )
            for tool in use.tools
        )
        chat.tool_choice.mode = _MODES[use.choice]
        chat.tool_choice.function = use.function
        chat.tool_choice.allowed.extend(sorted(use.allowed or ()))
        chat.parallel_tool_calls = use.is_parallel
    return chat


def _message_to_wire(message: ChatMessage, where: str) -> inference_pb2.ChatMessage:
    calls = calls_from_input(message, where)
    texts = {name: str(message.get(name) or "") for name in ("role", "tool_call_id", "name", "reasoning")}
    return inference_pb2.ChatMessage(
        **texts,
        content=content_from_input(message, where),
        tool_calls=[inference_pb2.ToolCall(id=c.call_id, name=c.name, arguments=c.arguments) for c in calls],
    )


def tokenize_request(prompt: str | Sequence[ChatMessage], model: str) -> inference_pb2.TokenizeRequest:
    """Build the message for `Inference.Tokenize`."""
    if isinstance(prompt, str):
        return inference_pb2.TokenizeRequest(model=model, text=prompt)
    return inference_pb2.TokenizeRequest(model=model, chat=chat_to_wire(prompt))


def embed_request(
    inputs: Sequence[str | Sequence[int]],
    params: PoolingParams,
    model: str,
    request_id: str,
    priority: int,
    cache_salt: str,
) -> inference_pb2.EmbedRequest:
    """Build the message for `Inference.Embed`.

    Args:
        inputs: each a string or a list of token ids.
        params: parameters of the vectors.
        model: name of the model; empty for the served model.
        request_id: id of the request; empty for an id chosen by the server.
        priority: priority of the request; lower numbers come first.
        cache_salt: requests with unequal salts share no KV; empty for the tenant's cache.

    Raises:
        InvalidRequest: `dimensions` is less than 1, which the message cannot express.
    """
    if params.dimensions is not None and params.dimensions < 1:
        raise InvalidRequest(f"dimensions must be at least 1, not {params.dimensions}", field="dimensions")
    kind = inference_pb2.EmbedRequest.Input
    given = [
        kind(text=each) if isinstance(each, str) else kind(tokens=common_pb2.TokenIds(ids=each)) for each in inputs
    ]
    return inference_pb2.EmbedRequest(
        request_id=request_id,
        model=model,
        inputs=given,
        pooling=pooling_to_wire(params),
        priority=priority,
        cache_salt=cache_salt,
    )


def model_info(response: inference_pb2.GetModelInfoResponse) -> ModelInfo:
    """Convert the response of `Inference.GetModelInfo`."""
    return ModelInfo(
        model=response.model,
        digest=response.digest,
        max_model_tokens=response.max_model_tokens,
        vocab_size=response.vocab_size,
        eos_token_ids=tuple(response.eos_token_ids),
    )


def metadata(api_key: str | None) -> Metadata:
    """Return the metadata sent with every call: the API key, if there is one."""
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


def gather(chunks: Iterable[TextChunk]) -> list[Completion]:
    """Assemble complete samples from their chunks, ordered by index.

    Raises:
        InvariantBroken: a sample's last chunk is missing.
    """
    samples: dict[int, list[TextChunk]] = {}
    for chunk in chunks:
        samples.setdefault(chunk.index, []).append(chunk)
    return [_whole(samples[index]) for index in sorted(samples)]


def _whole(chunks: Sequence[TextChunk]) -> Completion:
    last = chunks[-1]
    if last.finish_reason is None or last.usage is None or last.timing is None:
        raise InvariantBroken(f"the stream ended without the last chunk of sample {last.index}")
    calls = AssembledCalls()
    for chunk in chunks:
        calls.add(chunk.tool_calls)
    return Completion(
        index=last.index,
        text="".join(chunk.text for chunk in chunks),
        tokens=tuple(token for chunk in chunks for token in chunk.tokens),
        finish_reason=last.finish_reason,
        usage=last.usage,
        timing=last.timing,
        stop_reason=last.stop_reason,
        prompt_logprobs=chunks[0].prompt_logprobs,
        reasoning="".join(chunk.reasoning for chunk in chunks),
        tool_calls=calls.whole(),
    )
