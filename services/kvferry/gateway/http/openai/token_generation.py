"""Tokens in, tokens out: POST /inference/v1/generate, whose request and response are those of vLLM 0.32.

The response has no text, so that the tokens of a conversation or of a rollout are never encoded again.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from msgspec import UNSET, Struct, UnsetType
from pydantic import Field

from kvferry.core.errors import CONTEXT_LENGTH_EXCEEDED, InvalidRequest
from kvferry.core.inference.chunks import TextChunk, Timing
from kvferry.core.limits import MAX_CACHE_SALT_CHARS
from kvferry.core.sampling import MAX_OUTPUT_TOKENS
from kvferry.gateway.http.fields import field_policy
from kvferry.gateway.http.fields.cache_fields import CacheHintFields
from kvferry.gateway.http.fields.field_policy import Rules
from kvferry.gateway.http.fields.request_fields import StructuredOutputs
from kvferry.gateway.http.fields.strict import Priority, check_sizes, json_object, parse_fields
from kvferry.gateway.http.openai import reply
from kvferry.gateway.http.openai.completions import RunningUsage, in_parts
from kvferry.gateway.http.openai.generation import Generation, ReadRequest, prepared, read_prompts
from kvferry.gateway.http.openai.schema import CompletionRequest, GenerationFields, StreamOptions
from kvferry.rpc.wire import check_request_id
from kvferry.serving.request import Caller
from kvferry.serving.text_model import TextModel
from kvferry.serving.text_service import TextService

_PROMPT = "token_ids"
_SAMPLING = "sampling_params"


class TokenSampling(GenerationFields):
    """The object `sampling_params`, named as the parameters of vLLM's `SamplingParams`."""

    RULES: ClassVar[Rules] = field_policy.TOKEN_SAMPLING

    logprobs: int | None = None
    """Number of alternatives per output token; `None` for a response without log-probabilities."""
    structured_outputs: StructuredOutputs | None = None


class TokenRequest(CacheHintFields):
    """Request body of POST /inference/v1/generate."""

    RULES: ClassVar[Rules] = field_policy.TOKENS

    token_ids: Annotated[list[int], Field(min_length=1, fail_fast=True)]
    """The prompt."""
    sampling_params: TokenSampling = TokenSampling()
    request_id: str | None = None
    """Returned in the response; by default, the response has the id of the header `x-request-id`."""
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_CACHE_SALT_CHARS)] | None = None
    priority: Priority = 0

    def as_completion(self) -> CompletionRequest:
        """Return the completions request that generates the same tokens."""
        sampling = self.sampling_params
        given = sampling.model_dump(exclude_none=True, exclude={"structured_outputs"})
        if sampling.max_tokens is None and "max_tokens" in sampling.model_fields_set:
            given["max_tokens"] = MAX_OUTPUT_TOKENS  # a null is no limit, as in vLLM; completions have a default
        return CompletionRequest.model_construct(
            prompt=self.token_ids,
            structured_outputs=sampling.structured_outputs,
            model=self.model,
            stream=self.stream,
            stream_options=self.stream_options,
            cache_salt=self.cache_salt,
            priority=self.priority,
            return_token_ids=True,
            **{name: getattr(self, name) for name in CacheHintFields.model_fields},
            **given,
        )


class TokenReply(Struct):
    """Response of POST /inference/v1/generate, or a chunk of its stream."""

    request_id: str
    choices: list[reply.TokenChoice]
    prompt_logprobs: reply.PromptLogprobs | None = None
    usage: reply.UsageObject | UnsetType | None = UNSET
    """Token usage; in a stream as for completions."""
    kvferry: Timing | UnsetType = UNSET
    """Timing of the first choice."""


@dataclass(frozen=True, slots=True)
class ReadTokens:
    """A valid request, and the id that its response has."""

    request: ReadRequest
    request_id: str | None


def read_tokens(model: TextModel, body: bytes, *, is_strict: bool = False) -> ReadTokens:
    """Parse and validate a request.

    Args:
        model: the served model.
        body: JSON body of the request.
        is_strict: whether unknown fields are refused.

    Raises:
        InvalidRequest, UnknownModel: the request is invalid or cannot be served by this gateway.
    """
    fields = json_object(body)
    check_sizes({name: value for name, value in fields.items() if name != _PROMPT})
    if isinstance(sampling := fields.get(_SAMPLING), dict):
        with _own_fields():
            check_sizes(sampling)
    request = parse_fields(TokenRequest, fields, is_strict=is_strict)
    with _own_fields():
        if request.request_id is not None:
            check_request_id(request.request_id)
        read = read_prompts(model, request.as_completion(), 1)
    ignored = (*request.ignored, *request.actions_without_effect())
    return ReadTokens(replace(read, ignored=ignored), request.request_id)


@contextmanager
def _own_fields() -> Iterator[None]:
    """Give fields in errors the paths that they have in this API."""
    try:
        yield
    except InvalidRequest as error:
        raise _renamed(error) from None


def _renamed(error: InvalidRequest) -> InvalidRequest:
    name = error.field or ""
    first, _, rest = name.partition(".")
    if first == "prompt":
        path = ".".join(filter(None, (_PROMPT, rest)))
    elif first in TokenSampling.model_fields:
        path = f"{_SAMPLING}.{name}"
    else:
        return error
    # Clients recognize a prompt that is too long by the words of the message.
    message = error.message if error.reason == CONTEXT_LENGTH_EXCEEDED else error.message.replace(name, path, 1)
    return InvalidRequest(message, field=path, reason=error.reason)


@dataclass(frozen=True, slots=True)
class TokenGeneration:
    """A validated request and the id of its response."""

    generation: Generation
    request_id: str


async def prepare_tokens(
    service: TextService, caller: Caller, body: bytes, *, is_strict: bool = False
) -> TokenGeneration:
    """Validate a request.

    Args:
        service: the served model, and its limits.
        caller: request id, tenant and arrival time.
        body: body of the request, JSON.
        is_strict: whether unknown fields are refused.

    Raises:
        InvalidRequest: a field is invalid or not supported.
        UnknownModel: this gateway serves a different model.
    """
    read = await service.read(caller.client, read_tokens, len(body), body, is_strict=is_strict)
    with _own_fields():
        generation = await prepared(service, caller, read.request, is_chat=False)
    return TokenGeneration(generation, read.request_id or caller.request_id)


@dataclass(slots=True)
class _Sample:
    choice: reply.TokenChoice
    timing: Timing = field(default_factory=Timing)
    prompt_logprobs: reply.PromptLogprobs | None = None

    def add(self, chunk: TextChunk, generation: Generation) -> None:
        spell = generation.service.model.tokenizer.token_bytes
        self.choice.token_ids += [token.token_id for token in chunk.tokens]
        self.choice.logprobs = reply.continued(self.choice.logprobs, reply.chat_logprobs(chunk.tokens, spell))
        if generation.prompt_logprobs is not None and chunk.prompt_logprobs is not None:
            self.prompt_logprobs = reply.prompt_logprobs(chunk.prompt_logprobs, generation.prompt_logprobs, spell)
        if chunk.finish_reason is not None:
            self.choice.finish_reason, self.choice.stop_reason = chunk.finish_reason.value, chunk.stop_reason
            self.timing = chunk.timing or self.timing
            reply.add_versions(self.choice, chunk.timing)


async def answer(request: TokenGeneration) -> bytes:
    """Run the generation; return the whole response as JSON.

    Raises:
        KvferryError: the generation failed.
    """
    generation = request.generation
    samples: dict[int, _Sample] = {}
    usage: reply.UsageObject | None = None
    async with aclosing(generation.chunks()) as chunks:
        async for chunk in chunks:
            sample = samples.setdefault(chunk.index, _Sample(reply.TokenChoice(chunk.index, [])))
            await in_parts(chunk, sample.add, chunk, generation)
            usage = reply.add_usage(usage, chunk, first_sample=chunk.index == 0)
    choices = [sample.choice for _, sample in sorted(samples.items())]
    first = samples[0]
    whole = TokenReply(request.request_id, choices, first.prompt_logprobs, usage, first.timing)
    return reply.encode(whole)


async def events(request: TokenGeneration) -> AsyncGenerator[bytes, None]:
    """Run the generation; yield server-sent events, without the closing `[DONE]`.

    Raises:
        KvferryError: the generation failed, before or after the first event.
    """
    generation = request.generation
    spell = generation.service.model.tokenizer.token_bytes
    running = RunningUsage(generation)
    usage: reply.UsageObject | None = None
    timing: Timing | UnsetType = UNSET
    async with aclosing(generation.chunks()) as chunks:
        async for chunk in chunks:
            usage = reply.add_usage(usage, chunk, first_sample=chunk.index == 0)
            if chunk.timing is not None and chunk.index == 0:
                timing = chunk.timing
            finish = None if chunk.finish_reason is None else chunk.finish_reason.value
            ids = [token.token_id for token in chunk.tokens]
            if not ids and finish is None:
                continue
            logprobs = reply.chat_logprobs(chunk.tokens, spell)
            choice = reply.TokenChoice(chunk.index, ids, logprobs, finish, chunk.stop_reason)
            reply.add_versions(choice, chunk.timing)
            event = TokenReply(request.request_id, [choice])
            if generation.form.include_usage:
                event.usage = running.after(chunk) if generation.form.has_running_usage else None
            yield reply.sse(event)
    if generation.form.include_usage:
        yield reply.sse(TokenReply(request.request_id, [], usage=usage, kvferry=timing))
