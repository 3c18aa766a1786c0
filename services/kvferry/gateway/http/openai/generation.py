"""Generations of OpenAI's API: reads chat and text completions from their JSON bodies and starts them.

Bodies are converted to sampling parameters and token ids; large ones are read in the text process.
"""

import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import msgspec
from msgspec import UNSET, UnsetType

from kvferry.core.errors import InvalidRequest, UnknownModel
from kvferry.core.ids import RequestId
from kvferry.core.inference.beams import BeamParams
from kvferry.core.inference.chunks import TextChunk
from kvferry.core.inference.tools import ToolUse
from kvferry.core.retention import NO_HINTS, CacheHints
from kvferry.core.sampling import FinishReason, SamplingParams
from kvferry.gateway.http.fields.request_fields import in_field, overflow_in
from kvferry.gateway.http.fields.tool_fields import custom_names, custom_places, in_custom_tools
from kvferry.gateway.http.openai import reply
from kvferry.gateway.http.openai.schema import ChatRequest, CompletionRequest, parse
from kvferry.serving import prompts
from kvferry.serving.merging import merge
from kvferry.serving.request import Caller, Request
from kvferry.serving.text_model import TextModel
from kvferry.serving.text_service import MAX_RUNNING_SAMPLES, TextService
from kvferry.text.answers.answer import SplitOptions
from kvferry.text.requests.prompt_parameters import check_answer_logprobs, check_prompt_logprobs, with_bad_word_tokens

MAX_REQUEST_SAMPLES = 128
"""Maximum number of samples per request, over all its prompts."""


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """What the response has besides the output."""

    include_usage: bool = False
    """Whether a stream ends with the usage."""
    has_running_usage: bool = False
    """Whether each chunk of a stream has the usage so far."""
    has_token_ids: bool = False
    """Whether the response has the token ids of prompts and outputs."""
    has_reasoning: bool = True
    custom_tools: frozenset[str] = frozenset()
    """Names of the tools whose calls have a free text as input."""
    custom_places: frozenset[int] = frozenset()
    """Places of these tools among all tools."""

    def named(self, error: InvalidRequest, constraint_field: str) -> InvalidRequest:
        """Return a constraint's error with the name of the field that sets the constraint."""
        return in_custom_tools(in_field(error, constraint_field), self.custom_places)

    @classmethod
    def of(cls, request: ChatRequest | CompletionRequest) -> "ReplyForm":
        """Return what a request asks for."""
        return cls(
            request.include_usage,
            request.has_running_usage,
            bool(request.return_token_ids),
            not isinstance(request, ChatRequest) or request.include_reasoning is not False,
            custom_names(request.tools) if isinstance(request, ChatRequest) else frozenset(),
            custom_places(request.tools) if isinstance(request, ChatRequest) else frozenset(),
        )


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A request whose fields are valid, with its prompts as token ids."""

    model: str
    """The requested model or adapter; empty for the model."""
    prompts: tuple[list[int], ...]
    sampling: SamplingParams
    num_samples: int
    """Number of samples per prompt."""
    stream: bool
    cache_salt: str
    priority: int
    constraint_field: str
    """Field of the request that sets the constraint of `sampling`; empty if the output is free."""
    hints: CacheHints = NO_HINTS
    """What the request asks of the cache."""
    num_choices: int | None = None
    """Number of samples per prompt that are returned, the ones with the highest log-probability; `None` for all."""
    echoes: tuple[str | None, ...] = ()
    """Texts of the prompts, `None` for a prompt of token ids; empty if the response does not repeat the prompts."""
    prompt_logprobs: int | None = None
    """The request's `prompt_logprobs`; `sampling` may have a larger number, for the log-probabilities of an echo."""
    is_echo_alone: bool = False
    """Whether the response leaves out the output."""
    split: SplitOptions | None = None
    """Options for splitting answers into reasoning, content and tool calls; `None` if they are not split."""
    beams: BeamParams | None = None
    """Parameters of a beam search, whose best `num_samples` outputs are returned; `None` if outputs are sampled."""
    form: ReplyForm = field(default_factory=ReplyForm)
    ignored: tuple[str, ...] = ()
    """Names of the request's fields without effect, see `fields.strict.kept_fields`."""


def read_chat(model: TextModel, body: bytes, *, is_strict: bool = False) -> ReadRequest:
    """Parse the body of a chat request, render its template and tokenize the prompt.

    Args:
        model: the served model.
        body: JSON body of the request.
        is_strict: whether unknown fields are refused.

    Raises:
        InvalidRequest, UnknownModel: the request is invalid or cannot be served by this gateway.
    """
    request = parse(ChatRequest, body, is_strict=is_strict)
    return read_conversation(model, request, request.to_tool_use(), request.constraint()[0] or "tools")


def read_conversation(model: TextModel, request: ChatRequest, use: ToolUse, constraint_field: str) -> ReadRequest:
    """Render the template of a valid chat request and tokenize the prompt.

    Args:
        model: the served model: tokenizer and chat template.
        request: a valid chat request.
        use: the tools that are offered.
        constraint_field: field of the client's request that sets the constraint, for errors.

    Raises:
        InvalidRequest, UnknownModel: the request is invalid or cannot be served by this gateway.
    """
    name = _model_name(model, request.model)
    sampling = with_bad_word_tokens(request.to_sampling(), model.tokenizer)
    chat = prompts.prepare_chat(
        model,
        request.template_inputs(),
        use,
        sampling,
        request.template_variables(),
        request.prompt_end(),
        max_reasoning_tokens=request.max_reasoning_tokens(),
        stops_in_reasoning=request.stop_in_reasoning is True,
    )
    return ReadRequest(
        model=name,
        prompts=(list(chat.token_ids),),
        sampling=chat.sampling,
        num_samples=request.num_samples,
        stream=bool(request.stream),
        cache_salt=request.cache_salt or "",
        priority=request.priority,
        hints=request.cache_hints(request.cache_marks()),
        constraint_field=constraint_field,
        prompt_logprobs=request.prompt_logprobs,
        split=chat.split,
        beams=request.beam_params(sampling.max_tokens),
        form=ReplyForm.of(request),
        ignored=(*request.ignored, *request.actions_without_effect(), *request.described_formats()),
    )


def read_completion(model: TextModel, body: bytes, max_prompts: int, *, is_strict: bool = False) -> ReadRequest:
    """Parse the body of a completions request and tokenize its prompts.

    Args:
        model: the served model.
        body: JSON body of the request.
        max_prompts: maximum number of prompts in the request.
        is_strict: whether unknown fields are refused.

    Raises:
        InvalidRequest, UnknownModel: the request is invalid or cannot be served by this gateway.
    """
    return read_prompts(model, parse(CompletionRequest, body, is_strict=is_strict), max_prompts)


def read_prompts(model: TextModel, request: CompletionRequest, max_prompts: int) -> ReadRequest:
    """Tokenize the prompts of a valid completions request.

    Args:
        model: the served model.
        request: a valid completions request.
        max_prompts: maximum number of prompts in the request.

    Raises:
        InvalidRequest, UnknownModel: the request is invalid or cannot be served by this gateway.
    """
    name = _model_name(model, request.model)
    sampling = with_bad_word_tokens(request.to_sampling(), model.tokenizer)
    found = request.prompts(max_prompts)
    beams = request.beam_params(request.max_tokens)
    num_samples = len(found) * request.num_generated
    if num_samples > MAX_REQUEST_SAMPLES:
        field = "n" if request.best_of is None else "best_of"
        raise InvalidRequest(
            f"{len(found)} prompts with {field}={request.num_generated} need {num_samples} samples; at most "
            f"{MAX_REQUEST_SAMPLES} are accepted in one request",
            field=field,
        )
    encoded = tuple(prompts.encode_text(model, prompt) if isinstance(prompt, str) else prompt for prompt in found)
    for ids in encoded if sampling.truncate_prompt_tokens is None else ():
        prompts.check_num_tokens(model, len(ids))
    return ReadRequest(
        model=name,
        prompts=encoded,
        sampling=sampling,
        num_samples=request.num_generated if beams is None else request.num_samples,
        stream=bool(request.stream),
        cache_salt=request.cache_salt or "",
        priority=request.priority,
        hints=request.cache_hints(),
        constraint_field=request.constraint()[0],
        num_choices=request.num_samples if request.num_generated > request.num_samples and beams is None else None,
        echoes=tuple(prompt if isinstance(prompt, str) else None for prompt in found) if request.echo else (),
        prompt_logprobs=request.prompt_logprobs,
        is_echo_alone=request.is_echo_alone,
        beams=beams,
        form=ReplyForm.of(request),
        ignored=(*request.ignored, *request.actions_without_effect()),
    )


def _model_name(model: TextModel, name: str | None) -> str:
    if name == "":  # an empty name means an absent field in gRPC, but in HTTP the client sent it
        raise UnknownModel(f"model '' is not served here; use {model.name!r}", field="model")
    return name or ""


@dataclass(frozen=True, slots=True)
class Generation:
    """A validated request and the form of its response."""

    service: TextService
    requests: tuple[Request, ...]
    """A request per prompt."""
    is_chat: bool
    stream: bool
    created: int
    """Unix time of the response, seconds."""
    num_choices: int | None = None
    """Number of samples per prompt in the response: the best ones; `None` for all."""
    logprobs: int | None = None
    """Number of alternatives per output token in the response; `None` for a response without log-probabilities."""
    prompt_logprobs: int | None = None
    """Number of alternatives per prompt token in the response; `None` for a response without prompt
    log-probabilities."""
    echoes: tuple[str, ...] = ()
    """Texts of the prompts, if they precede the outputs in the response; otherwise empty."""
    is_echo_alone: bool = False
    """Whether the response has no output."""
    constraint_field: str = ""
    """Field of the request that contains the output's constraint."""
    form: ReplyForm = field(default_factory=ReplyForm)
    ignored: tuple[str, ...] = ()
    """Names of the request's fields without effect."""

    @property
    def is_resumable(self) -> bool:
        """Whether the stream can be continued by another gateway: it has one sequence, whose output is shown, and no
        log-probabilities of its prompt."""
        first = self.requests[0]
        is_one = len(self.requests) == 1 and first.num_samples == 1 and first.beams is None
        return is_one and not self.is_echo_alone and first.sampling.prompt_logprobs is None

    @property
    def reply_id(self) -> str:
        """The response's `id` in OpenAI's form."""
        return f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.requests[0].caller.request_id}"

    def prompt_token_ids(self, index: int) -> list[int] | UnsetType:
        """Return the token ids of the prompt of sample `index`, if the response has them."""
        if not self.form.has_token_ids:
            return UNSET
        return list(self.requests[index // self.requests[0].num_samples].token_ids)

    def output_token_ids(self, chunk: TextChunk) -> list[int] | UnsetType:
        """Return the token ids of a chunk, if the response has them."""
        return [token.token_id for token in chunk.tokens] if self.form.has_token_ids else UNSET

    def reply(self, choices: Sequence[reply.Choice | msgspec.Raw]) -> reply.Reply[reply.Choice | msgspec.Raw]:
        """Build a response, or a stream chunk, with these choices."""
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if self.stream else "chat.completion"
        adapter = self.requests[0].caller.adapter
        model = self.service.model.name if adapter is None else adapter.name
        return reply.Reply(self.reply_id, kind, self.created, model, choices)

    def chunks(self) -> AsyncGenerator[TextChunk, None]:
        """Return an iterator over the chunks of all prompts and samples, which begins when the request is admitted;
        `index` is prompt index * `num_samples` + sample index.

        Raises:
            KvferryError: the generation failed; an error of the constraint names the request's field.
        """
        return self.service.admitted(self.requests, self._chunks_now)

    def _chunks_now(self, requests: Sequence[Request]) -> AsyncGenerator[TextChunk, None]:
        cut = _without_output if self.is_echo_alone else None if self.form.has_reasoning else _without_reasoning
        sources = [
            self._changed(self.service.generate_now(request), number * request.num_samples, cut)
            for number, request in enumerate(requests)
        ]
        at_once = max(1, MAX_RUNNING_SAMPLES // requests[0].num_sequences)
        return sources[0] if len(sources) == 1 else merge(sources, at_once=at_once)

    async def _changed(
        self, chunks: AsyncGenerator[TextChunk, None], by: int, cut: Callable[[TextChunk], TextChunk] | None
    ) -> AsyncGenerator[TextChunk, None]:
        """Yield chunks with `by` added to their index, and passed through `cut` if it is set."""
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    moved = chunk if by == 0 else replace(chunk, index=chunk.index + by)
                    yield moved if cut is None else cut(moved)
        except InvalidRequest as error:
            raise self.form.named(error, self.constraint_field) from None

    def echo(self, index: int) -> str:
        """Return the text that precedes the output of sample `index`: its prompt, or nothing."""
        return self.echoes[index // self.requests[0].num_samples] if self.echoes else ""


async def prepare_chat(service: TextService, caller: Caller, body: bytes, *, is_strict: bool = False) -> Generation:
    """Validate a chat request.

    Args:
        service: the text service.
        caller: id, tenant and arrival time of the request.
        body: JSON body of the request.
        is_strict: whether unknown fields are refused.

    Raises:
        InvalidRequest: a field is invalid or not supported.
        UnknownModel: this gateway serves a different model.
    """
    with overflow_in("messages"):
        read = await service.read(caller.client, read_chat, len(body), body, is_strict=is_strict)
        return await prepared(service, caller, read, is_chat=True)


async def prepare_completion(
    service: TextService, caller: Caller, body: bytes, max_prompts: int, *, is_strict: bool = False
) -> Generation:
    """Validate a completions request.

    Args:
        service: the served model, and its limits.
        caller: request id, tenant and arrival time.
        body: body of the request, JSON.
        max_prompts: maximum number of prompts in the request.
        is_strict: whether unknown fields are refused.

    Raises:
        InvalidRequest: a field is invalid or not supported.
        UnknownModel: this gateway serves a different model.
    """
    request = await service.read(caller.client, read_completion, len(body), body, max_prompts, is_strict=is_strict)
    return await prepared(service, caller, request, is_chat=False)


async def prepared(service: TextService, caller: Caller, read: ReadRequest, *, is_chat: bool) -> Generation:
    """Check a request that was read against the served model and the tenant's access.

    Args:
        service: the served model, and its limits.
        caller: request id, tenant and arrival time.
        read: the request with its tokenized prompts.
        is_chat: whether the response has the format of chat completions; otherwise of text completions.

    Raises:
        InvalidRequest: the request cannot be served with this model, or its constraint cannot be compiled.
        UnknownModel: the model or adapter is unknown, or the tenant may not use it.
    """
    adapter = service.adapter_of(read.model)
    service.check_access(caller.tenant, service.model.name if adapter is None else adapter.name)
    sampling = read.sampling
    if read.num_choices is not None and sampling.logprobs is None:
        sampling = replace(sampling, logprobs=0)  # the samples are compared by their log-probabilities
    caller = replace(caller, cache_salt=read.cache_salt, adapter=adapter, priority=read.priority, hints=read.hints)
    requests = tuple(
        _fitted(
            service,
            read,
            Request(
                caller if len(read.prompts) == 1 else _of_prompt(caller, number),
                ids,
                sampling,
                num_samples=read.num_samples,
                split=read.split,
                beams=read.beams,
            ),
        )
        for number, ids in enumerate(read.prompts)
    )
    if not read.stream:
        check_answer_logprobs(requests[0].sampling, read.num_samples * len(requests))
    check_prompt_logprobs(sampling, read.num_samples * sum(len(request.token_ids) for request in requests))
    if read.sampling.constraint is not None:
        try:
            first = await service.checked(requests[0])
            requests = tuple(replace(request, sampling=first.sampling) for request in requests)
        except InvalidRequest as error:
            raise read.form.named(error, read.constraint_field) from None
    created = math.floor(service.clock.wall())
    decode = service.model.tokenizer.decode
    return Generation(
        service,
        requests,
        is_chat,
        read.stream,
        created,
        read.num_choices,
        logprobs=read.sampling.logprobs,
        prompt_logprobs=read.prompt_logprobs,
        is_echo_alone=read.is_echo_alone,
        constraint_field=read.constraint_field,
        form=read.form,
        ignored=read.ignored,
        echoes=tuple(
            text if text is not None and len(request.token_ids) == len(ids) else decode(request.token_ids)
            for text, ids, request in zip(read.echoes, read.prompts, requests, strict=False)
        ),
    )


def _of_prompt(caller: Caller, number: int) -> Caller:
    return replace(caller, request_id=RequestId(f"{caller.request_id}-{number}"))


def _fitted(service: TextService, read: ReadRequest, request: Request) -> Request:
    try:
        return service.fit(request)
    except InvalidRequest as error:
        raise read.form.named(error, read.constraint_field) from None


def _without_output(chunk: TextChunk) -> TextChunk:
    """Return a chunk without its output, as if no token had been generated."""
    usage = None if chunk.usage is None else replace(chunk.usage, output_tokens=0)
    finish = None if chunk.finish_reason is None else FinishReason.LENGTH
    return replace(
        chunk, text="", tokens=(), finish_reason=finish, stop_reason=None, usage=usage, reasoning="", tool_calls=()
    )


def _without_reasoning(chunk: TextChunk) -> TextChunk:
    return replace(chunk, reasoning="") if chunk.reasoning else chunk
