"""Generations of OpenAI's API: validates chat and text completions and starts them."""

import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec

from kvferry.core.errors import InvalidRequest
from kvferry.core.ids import RequestId
from kvferry.core.inference.chunks import TextChunk
from kvferry.core.sampling import FinishReason
from kvferry.gateway.http.fields.constraint_fields import in_field
from kvferry.gateway.http.openai import reply
from kvferry.gateway.http.openai.request import ReadRequest, read_chat, read_completion
from kvferry.serving.merging import merge
from kvferry.serving.request import Caller, Request
from kvferry.serving.text_service import TextService
from kvferry.serving.text_stream import MAX_RUNNING_SAMPLES
from kvferry.text.requests.prompt_parameters import check_prompt_logprobs


@dataclass(frozen=True, slots=True)
class Generation:
    """A validated request and the form of its response."""

    service: TextService
    requests: tuple[Request, ...]
    """A request per prompt."""
    is_chat: bool
    stream: bool
    include_usage: bool
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

    @property
    def reply_id(self) -> str:
        """The response's `id` in OpenAI's form."""
        return f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.requests[0].caller.request_id}"

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
        cut = _without_output if self.is_echo_alone else None
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
            raise in_field(error, self.constraint_field) from None

    def echo(self, index: int) -> str:
        """Return the text that precedes the output of sample `index`: its prompt, or nothing."""
        return self.echoes[index // self.requests[0].num_samples] if self.echoes else ""


async def prepare_chat(service: TextService, caller: Caller, body: bytes) -> Generation:
    """Validate a chat request.

    Args:
        service: the text service.
        caller: id, tenant and arrival time of the request.
        body: JSON body of the request.

    Raises:
        InvalidRequest: a field is invalid or not supported.
        UnknownModel: this gateway serves a different model.
    """
    return await prepared(service, caller, await service.read(read_chat, len(body), body), is_chat=True)


async def prepare_completion(service: TextService, caller: Caller, body: bytes, max_prompts: int) -> Generation:
    """Validate a completions request.

    Args:
        service: the served model, and its limits.
        caller: request id, tenant and arrival time.
        body: body of the request, JSON.
        max_prompts: maximum number of prompts in the request.

    Raises:
        InvalidRequest: a field is invalid or not supported.
        UnknownModel: this gateway serves a different model.
    """
    request = await service.read(read_completion, len(body), body, max_prompts)
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
    caller = replace(caller, cache_salt=read.cache_salt, adapter=adapter, priority=read.priority)
    requests = tuple(
        _fitted(
            service,
            read.constraint_field,
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
    check_prompt_logprobs(sampling, read.num_samples * sum(len(request.token_ids) for request in requests))
    if read.sampling.constraint is not None:
        try:
            await service.check(read.sampling.constraint, caller.tenant)
        except InvalidRequest as error:
            raise in_field(error, read.constraint_field) from None
    created = math.floor(service.clock.wall())
    decode = service.model.tokenizer.decode
    return Generation(
        service,
        requests,
        is_chat,
        read.stream,
        read.include_usage,
        created,
        read.num_choices,
        logprobs=read.sampling.logprobs,
        prompt_logprobs=read.prompt_logprobs,
        is_echo_alone=read.is_echo_alone,
        constraint_field=read.constraint_field,
        echoes=tuple(
            text if text is not None and len(request.token_ids) == len(ids) else decode(request.token_ids)
            for text, ids, request in zip(read.echoes, read.prompts, requests, strict=False)
        ),
    )


def _of_prompt(caller: Caller, number: int) -> Caller:
    return replace(caller, request_id=RequestId(f"{caller.request_id}-{number}"))


def _fitted(service: TextService, constraint_field: str, request: Request) -> Request:
    try:
        return service.fit(request)
    except InvalidRequest as error:
        raise in_field(error, constraint_field) from None


def _without_output(chunk: TextChunk) -> TextChunk:
    """Return a chunk without its output, as if no token had been generated."""
    usage = None if chunk.usage is None else replace(chunk.usage, output_tokens=0)
    finish = None if chunk.finish_reason is None else FinishReason.LENGTH
    return replace(chunk, text="", tokens=(), finish_reason=finish, stop_reason=None, usage=usage)
