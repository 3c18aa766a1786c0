"""OpenAI's chat and text completions: validates requests and builds whole responses or event streams."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import ParamSpec, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from kvferry.core.errors import InvalidRequest
from kvferry.core.ids import RequestId
from kvferry.core.sampling import FinishReason
from kvferry.gateway.http.fields.constraint_fields import in_field
from kvferry.gateway.http.openai import reply
from kvferry.gateway.http.openai.request import ReadRequest, read_chat, read_completion
from kvferry.model.requests.output_text import StopReason
from kvferry.model.requests.prompt_parameters import check_prompt_logprobs
from kvferry.model.text.answers.pieces import AssembledCalls
from kvferry.rpc.text.merging import merge
from kvferry.rpc.text.text_service import TextService
from kvferry.rpc.text.text_stream import MAX_RUNNING_SAMPLES, TextChunk, TextRequest
from kvferry.rpc.text.token_source import Timing

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Caller:
    """Request id, tenant and arrival time of one HTTP request."""

    request_id: RequestId
    tenant: str
    arrived: float
    """Arrival time, monotonic seconds."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A validated request and the form of its response."""

    service: TextService
    requests: tuple[TextRequest, ...]
    """A request per prompt."""
    is_chat: bool
    stream: bool
    include_usage: bool
    created: int
    """Unix time of the response, seconds."""
    num_choices: int | None = None
    """Number of samples per prompt in the response: the best ones; `None` for all."""
    logprobs: int | None = None
    """Number of alternatives per token in the response; `None` for a response without log-probabilities."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    echoes: tuple[str, ...] = ()
    """Texts of the prompts, which precede the outputs in the response; empty if they do not."""
    is_echo_alone: bool = False
    """Whether the response has no output."""

    @property
    def reply_id(self) -> str:
        """The response's `id` in OpenAI's form."""
        return f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.requests[0].request_id}"

    def reply(self, choices: Sequence[reply.Choice | msgspec.Raw]) -> reply.Reply[reply.Choice | msgspec.Raw]:
        """Build a response, or a stream chunk, with these choices."""
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if self.stream else "chat.completion"
        adapter = self.requests[0].adapter
        model = self.service.model.name if adapter is None else adapter.name
        return reply.Reply(self.reply_id, kind, self.created, model, choices)

    def chunks(self) -> AsyncGenerator[TextChunk, None]:
        """Return an iterator over the chunks of all prompts and samples, which begins when the request is admitted;
        `index` is prompt index * `num_samples` +
        sample index."""
        return self.service.admitted(self.requests, self._chunks_now)

    def _chunks_now(self, requests: Sequence[TextRequest]) -> AsyncGenerator[TextChunk, None]:
        cut = _without_output if self.is_echo_alone else None
        sources = [
            _changed(self.service.generate_now(request), number * request.num_samples, cut)
            for number, request in enumerate(requests)
        ]
        at_once = max(1, MAX_RUNNING_SAMPLES // requests[0].num_samples)
        return sources[0] if len(sources) == 1 else merge(sources, at_once=at_once)

    def echo(self, index: int) -> str:
        """Return the text that precedes the output of sample `index`: its prompt, or nothing."""
        return self.echoes[index // self.requests[0].num_samples] if self.echoes else ""


async def prepare_chat(service: TextService, caller: Caller, body: bytes) -> Generation:
    """Validate a chat request.

    Raises:
        InvalidRequest: a field is invalid or not implemented.
        UnknownModel: this gateway serves a different model.
    """
    return await prepared(service, caller, await service.read(read_chat, len(body), body), is_chat=True)


async def prepare_completion(service: TextService, caller: Caller, body: bytes, max_prompts: int) -> Generation:
    """Validate a completions request.

    Raises:
        InvalidRequest: a field is invalid or not implemented.
        UnknownModel: this gateway serves a different model.
    """
    asked = await service.read(read_completion, len(body), body, max_prompts)
    return await prepared(service, caller, asked, is_chat=False)


async def answer(generation: Generation) -> tuple[bytes, Timing]:
    """Run the generation; return the whole response as JSON, and the timing of its first choice.

    Raises:
        KvferryError: the generation failed.
    """
    samples: dict[int, _Sample] = {}
    spell = generation.service.model.tokenizer.token_bytes
    usage: reply.Usage | None = None
    per_prompt = generation.requests[0].num_samples
    async with aclosing(generation.chunks()) as chunks:
        async for chunk in chunks:
            if chunk.index not in samples:
                samples[chunk.index] = _Sample(generation, [generation.echo(chunk.index)])
            await _in_parts(chunk, samples[chunk.index].add, chunk, spell)
            usage = reply.add_usage(usage, chunk, first_sample=chunk.index % per_prompt == 0)
    ordered = _best(samples, per_prompt, generation.num_choices)
    choices: list[msgspec.Raw] = []
    for index, sample in enumerate(ordered):
        choices.append(msgspec.Raw(reply.encode(sample.choice(index))))
        await asyncio.sleep(0)  # a large answer is encoded in parts, between which other requests continue
    whole = generation.reply(choices)
    whole.usage = usage
    whole.kvferry = samples[0].timing
    if generation.is_chat:
        whole.prompt_logprobs = samples[0].prompt_logprobs
    return reply.encode(whole), samples[0].timing


async def events(generation: Generation) -> AsyncGenerator[bytes, None]:
    """Run the generation; yield server-sent events, without the closing `[DONE]`.

    Raises:
        KvferryError: the generation failed, before or after the first event.
    """
    make = _chat_events(generation) if generation.is_chat else _text_events(generation)
    usage: reply.Usage | None = None
    timing: Timing | None = None
    per_prompt = generation.requests[0].num_samples
    async with aclosing(generation.chunks()) as chunks:
        async for chunk in chunks:
            usage = reply.add_usage(usage, chunk, first_sample=chunk.index % per_prompt == 0)
            timing = chunk.timing if chunk.timing is not None and chunk.index == 0 else timing
            for choice in await _in_parts(chunk, make, chunk):
                event = generation.reply([choice])
                if generation.include_usage:
                    event.usage = None
                yield reply.sse(event)
    if generation.include_usage:
        last = generation.reply([])
        last.usage = usage
        if timing is not None:
            last.kvferry = timing
        yield reply.sse(last)


def _echoed_logprobs(generation: Generation, chunk: TextChunk) -> reply.CompletionLogprobs | None:
    """Return the log-probabilities of the echoed prompt if `chunk` has them and the response shows them."""
    if not generation.echoes or generation.logprobs is None or chunk.prompt_logprobs is None:
        return None
    prompt = generation.requests[chunk.index // generation.requests[0].num_samples].token_ids
    spell = generation.service.model.tokenizer.token_bytes
    return reply.echoed_logprobs(prompt, chunk.prompt_logprobs, generation.logprobs, spell)


@dataclass(slots=True)
class _Sample:
    """A sample of a whole response. Log-probabilities are converted as they arrive, since all at once would stop the
    event loop."""

    generation: Generation
    texts: list[str]
    """Parts of the text; the first one is the echoed prompt."""
    reasoning: list[str] = field(default_factory=list)
    calls: AssembledCalls = field(default_factory=AssembledCalls)
    chat_logprobs: reply.ChatLogprobs | None = None
    text_logprobs: reply.CompletionLogprobs | None = None
    prompt_logprobs: reply.PromptLogprobs | UnsetType = UNSET
    offset: int = 0
    """Number of characters of all tokens so far."""
    score: float = 0.0
    """Cumulative log-probability of the tokens."""
    finish_reason: str = ""
    stop_reason: StopReason = None
    timing: Timing = field(default_factory=Timing)

    def add(self, chunk: TextChunk, spell: reply.TokenBytes) -> None:
        self.texts.append(chunk.text)
        self.reasoning.append(chunk.reasoning)
        self.calls.add(chunk.tool_calls)
        self.score += sum(token.logprob or 0.0 for token in chunk.tokens)
        if self.generation.logprobs is not None:
            self._add_logprobs(chunk, spell)
        if self.generation.prompt_logprobs is not None and chunk.prompt_logprobs is not None:
            num_top = self.generation.prompt_logprobs
            self.prompt_logprobs = reply.prompt_logprobs(chunk.prompt_logprobs, num_top, spell)
        if chunk.finish_reason is not None and chunk.timing is not None:
            self.finish_reason = chunk.finish_reason.value
            self.stop_reason = chunk.stop_reason
            self.timing = chunk.timing

    def _add_logprobs(self, chunk: TextChunk, spell: reply.TokenBytes) -> None:
        if self.generation.is_chat:
            self.chat_logprobs = reply.continued(self.chat_logprobs, reply.chat_logprobs(chunk.tokens, spell))
            return
        if (echoed := _echoed_logprobs(self.generation, chunk)) is not None:
            self.offset = sum(map(len, echoed.tokens))
            self.text_logprobs = echoed
        if (more := reply.completion_logprobs(chunk.tokens, spell, self.offset)) is not None:
            self.offset += sum(map(len, more.tokens))
            self.text_logprobs = reply.continued(self.text_logprobs, more)

    def choice(self, index: int) -> reply.Choice:
        """Build the response's choice `index`."""
        text = "".join(self.texts)
        if self.generation.is_chat:
            calls = [
                reply.ToolCall(call.call_id, reply.CalledFunction(call.arguments, call.name))
                for call in self.calls.whole()
            ]
            message = reply.ChatMessage(
                text or None if calls else text,
                reasoning_content="".join(self.reasoning) or UNSET,
                tool_calls=calls or UNSET,
            )
            finish = _finish(self.finish_reason, has_calls=bool(calls))
            return reply.ChatChoice(index, message, self.chat_logprobs, finish, self.stop_reason)
        reasons = self.finish_reason, self.stop_reason
        return reply.TextChoice(index, text, self.text_logprobs, *reasons, self.prompt_logprobs)


def _best(samples: Mapping[int, _Sample], per_prompt: int, num_choices: int | None) -> list[_Sample]:
    """Return the samples of a response: those of the first prompt, then those of the next. With `num_choices`, only
    this number per prompt is returned, those with the highest cumulative log-probability, the best first.
    """
    ordered = [sample for _, sample in sorted(samples.items())]
    if num_choices is None:
        return ordered
    chosen: list[_Sample] = []
    for start in range(0, len(ordered), per_prompt):
        chosen += sorted(ordered[start : start + per_prompt], key=lambda sample: -sample.score)[:num_choices]
    return chosen


def _chat_events(generation: Generation) -> Callable[[TextChunk], Sequence[reply.Choice]]:
    spell = generation.service.model.tokenizer.token_bytes
    split = generation.requests[0].split
    greeting = "" if split is None or not split.tool_names else None  # an answer with calls may have no content
    greeted: set[int] = set()
    calling: set[int] = set()

    def make(chunk: TextChunk) -> list[reply.ChunkChoice]:
        made: list[reply.ChunkChoice] = []
        if chunk.index not in greeted:
            greeted.add(chunk.index)
            made.append(reply.ChunkChoice(chunk.index, reply.Delta("assistant", greeting)))
        logprobs = reply.chat_logprobs(chunk.tokens, spell)
        if chunk.reasoning or chunk.text or chunk.tool_calls or logprobs is not None:
            delta = reply.Delta(
                content=chunk.text or (None if chunk.reasoning else greeting),
                reasoning_content=chunk.reasoning or None,
                tool_calls=[reply.call_delta(delta) for delta in chunk.tool_calls] or None,
            )
            made.append(reply.ChunkChoice(chunk.index, delta, logprobs))
        if chunk.tool_calls:
            calling.add(chunk.index)
        if chunk.finish_reason is not None:
            # As in OpenAI's API, the finish reason is sent in a separate chunk with an empty delta.
            finish = _finish(chunk.finish_reason.value, has_calls=chunk.index in calling)
            made.append(reply.ChunkChoice(chunk.index, reply.Delta(), None, finish, chunk.stop_reason))
        return made

    return make


def _finish(reason: str, *, has_calls: bool) -> str:
    """Return OpenAI's finish reason: an answer with calls that is complete ends with `tool_calls`."""
    return "tool_calls" if has_calls and reason == FinishReason.STOP else reason


def _text_events(generation: Generation) -> Callable[[TextChunk], Sequence[reply.Choice]]:
    spell = generation.service.model.tokenizer.token_bytes
    offsets: dict[int, int] = {}
    echoed: set[int] = set()

    def make(chunk: TextChunk) -> list[reply.TextChoice]:
        text = chunk.text
        if chunk.index not in echoed:
            echoed.add(chunk.index)
            text = generation.echo(chunk.index) + text
        logprobs = _echoed_logprobs(generation, chunk)
        offset = offsets.get(chunk.index, 0) if logprobs is None else sum(map(len, logprobs.tokens))
        logprobs = reply.continued(logprobs, reply.completion_logprobs(chunk.tokens, spell, offset))
        if logprobs is not None:
            offsets[chunk.index] = logprobs.text_offset[-1] + len(logprobs.tokens[-1])
        if not text and logprobs is None and chunk.finish_reason is None:
            return []
        finish = None if chunk.finish_reason is None else chunk.finish_reason.value
        return [reply.TextChoice(chunk.index, text, logprobs, finish, chunk.stop_reason)]

    return make


async def prepared(service: TextService, caller: Caller, asked: ReadRequest, *, is_chat: bool) -> Generation:
    """Check a request that was read against the served model and the tenant's access.

    Raises:
        InvalidRequest: the request cannot be served with this model, or its constraint cannot be compiled.
        UnknownModel: the model or adapter is unknown, or the tenant may not use it.
    """
    adapter = service.adapter_of(asked.model)
    service.check_access(caller.tenant, service.model.name if adapter is None else adapter.name)
    sampling = asked.sampling
    if asked.num_choices is not None and sampling.logprobs is None:
        sampling = replace(sampling, logprobs=0)  # the samples are compared by their log-probabilities
    requests = tuple(
        service.fit(
            TextRequest(
                request_id=caller.request_id if len(asked.prompts) == 1 else RequestId(f"{caller.request_id}-{number}"),
                token_ids=ids,
                sampling=sampling,
                num_samples=asked.num_samples,
                tenant=caller.tenant,
                cache_salt=asked.cache_salt,
                adapter=adapter,
                priority=asked.priority,
                arrived=caller.arrived,
                split=asked.split,
            )
        )
        for number, ids in enumerate(asked.prompts)
    )
    check_prompt_logprobs(sampling, asked.num_samples * sum(len(request.token_ids) for request in requests))
    if asked.sampling.constraint is not None:
        try:
            await service.check(asked.sampling.constraint)
        except InvalidRequest as error:
            raise in_field(error, asked.constraint_field) from None
    created = math.floor(service.clock.wall())
    decode = service.model.tokenizer.decode
    return Generation(
        service,
        requests,
        is_chat,
        asked.stream,
        asked.include_usage,
        created,
        asked.num_choices,
        logprobs=asked.sampling.logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        is_echo_alone=asked.is_echo_alone,
        echoes=tuple(
            text if text is not None and len(request.token_ids) == len(ids) else decode(request.token_ids)
            for text, ids, request in zip(asked.echoes, asked.prompts, requests, strict=False)
        ),
    )


async def _in_parts(chunk: TextChunk, convert: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call `convert`; if the chunk has log-probabilities of a prompt, on a thread, since they may be 65,536 numbers."""
    if chunk.prompt_logprobs is None:
        return convert(*args, **kwargs)
    return await asyncio.to_thread(convert, *args, **kwargs)


def _without_output(chunk: TextChunk) -> TextChunk:
    """Return a chunk without its output, as if no token had been generated."""
    usage = None if chunk.usage is None else replace(chunk.usage, output_tokens=0)
    finish = None if chunk.finish_reason is None else FinishReason.LENGTH
    return replace(chunk, text="", tokens=(), finish_reason=finish, stop_reason=None, usage=usage)


async def _changed(
    chunks: AsyncGenerator[TextChunk, None], by: int, cut: Callable[[TextChunk], TextChunk] | None
) -> AsyncGenerator[TextChunk, None]:
    """Yield chunks with `by` added to their index, cut by `cut` if it is given."""
    async with aclosing(chunks):
        async for chunk in chunks:
            moved = chunk if by == 0 else replace(chunk, index=chunk.index + by)
            yield moved if cut is None else cut(moved)
