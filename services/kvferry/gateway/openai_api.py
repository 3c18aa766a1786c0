"""OpenAI's two generating interfaces: a checked request in, a whole answer or a stream of events out."""

import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from kvferry.core.errors import UnknownModel
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SampledToken, SamplingParams
from kvferry.gateway import openai_reply as reply
from kvferry.gateway.openai_schema import ChatRequest, CompletionRequest, parse
from kvferry.rpc import prompts
from kvferry.rpc.merging import merge
from kvferry.rpc.text import TextChunk, TextRequest
from kvferry.rpc.text_service import TextService
from kvferry.rpc.token_source import Timing


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and when."""

    request_id: RequestId
    tenant: str
    arrived: float
    """Monotonic seconds."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A request that can run, in the form its answer will take."""

    service: TextService
    requests: tuple[TextRequest, ...]
    """One per prompt."""
    is_chat: bool
    stream: bool
    include_usage: bool
    created: int
    """Unix seconds."""

    @property
    def reply_id(self) -> str:
        """OpenAI's id of the answer."""
        return f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.requests[0].request_id}"

    def reply(self, choices: Sequence[reply.Choice]) -> reply.Reply:
        """An answer, or a chunk of one, around `choices`."""
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if self.stream else "chat.completion"
        return reply.Reply(self.reply_id, kind, self.created, self.service.model.name, choices)

    def chunks(self) -> AsyncGenerator[TextChunk, None]:
        """Chunks of all prompts and samples; `index` counts the samples of the first prompt, then the second's."""
        sources = [_offset(self.service.generate(r), number * r.num_samples) for number, r in enumerate(self.requests)]
        return sources[0] if len(sources) == 1 else merge(sources)


async def prepare_chat(service: TextService, caller: Caller, body: bytes) -> Generation:
    """Check a chat request.

    Raises:
        InvalidRequest, UnknownModel: it cannot run here.
    """
    asked = parse(ChatRequest, body)
    _check_model(service, asked.model)
    sampling = asked.to_sampling()
    token_ids = await prompts.encode_chat(service.model, [m.as_template_input() for m in asked.messages])
    request = _request(service, caller, token_ids, sampling, asked.num_samples)
    return Generation(service, (request,), True, bool(asked.stream), asked.include_usage, _now(service))


async def prepare_completion(service: TextService, caller: Caller, body: bytes, max_prompts: int) -> Generation:
    """Check a completions request.

    Raises:
        InvalidRequest, UnknownModel: it cannot run here.
    """
    asked = parse(CompletionRequest, body)
    _check_model(service, asked.model)
    sampling = asked.to_sampling()
    found = asked.prompts(max_prompts)
    requests: list[TextRequest] = []
    for number, prompt in enumerate(found):
        ids = await prompts.encode_text(service.model, prompt) if isinstance(prompt, str) else prompt
        own = caller
        if len(found) > 1:
            own = replace(caller, request_id=RequestId(f"{caller.request_id}-{number}"))
        requests.append(_request(service, own, ids, sampling, asked.num_samples))
    return Generation(service, tuple(requests), False, bool(asked.stream), asked.include_usage, _now(service))


async def answer(generation: Generation) -> tuple[bytes, Timing]:
    """The whole answer as JSON, and where the time of its first choice went.

    Raises:
        KvferryError: what the generation raised.
    """
    samples: dict[int, _Sample] = {}
    usage: reply.Usage | None = None
    per_prompt = generation.requests[0].num_samples
    async with aclosing(generation.chunks()) as chunks:
        async for chunk in chunks:
            samples.setdefault(chunk.index, _Sample()).add(chunk)
            usage = reply.add_usage(usage, chunk, first_sample=chunk.index % per_prompt == 0)
    ordered = sorted(samples.items())
    spell = generation.service.model.tokenizer.token_bytes
    choices: Sequence[reply.Choice]
    if generation.is_chat:
        choices = [
            reply.ChatChoice(
                index, reply.ChatMessage(sample.text), reply.chat_logprobs(sample.tokens, spell), sample.finish_reason
            )
            for index, sample in ordered
        ]
    else:
        choices = [
            reply.TextChoice(
                index, sample.text, reply.completion_logprobs(sample.tokens, spell, 0), sample.finish_reason
            )
            for index, sample in ordered
        ]
    whole = generation.reply(choices)
    whole.usage = usage
    whole.kvferry = reply.timing_object(ordered[0][1].timing)
    return reply.encode(whole), ordered[0][1].timing


async def events(generation: Generation) -> AsyncGenerator[bytes, None]:
    """The stream as server-sent events, without the closing `[DONE]`.

    Raises:
        KvferryError: what the generation raised, before or after the first event.
    """
    make = _chat_events(generation) if generation.is_chat else _text_events(generation)
    usage: reply.Usage | None = None
    timing: Timing | None = None
    per_prompt = generation.requests[0].num_samples
    async with aclosing(generation.chunks()) as chunks:
        async for chunk in chunks:
            usage = reply.add_usage(usage, chunk, first_sample=chunk.index % per_prompt == 0)
            timing = chunk.timing if chunk.timing is not None and chunk.index == 0 else timing
            for choice in make(chunk):
                event = generation.reply([choice])
                if generation.include_usage:
                    event.usage = None
                yield reply.sse(event)
    if generation.include_usage:
        last = generation.reply([])
        last.usage = usage
        if timing is not None:
            last.kvferry = reply.timing_object(timing)
        yield reply.sse(last)


@dataclass(slots=True)
class _Sample:
    texts: list[str] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)
    finish_reason: str = ""
    timing: Timing = field(default_factory=Timing)

    def add(self, chunk: TextChunk) -> None:
        self.texts.append(chunk.text)
        self.tokens.extend(chunk.tokens)
        if chunk.finish_reason is not None and chunk.timing is not None:
            self.finish_reason = chunk.finish_reason.value
            self.timing = chunk.timing

    @property
    def text(self) -> str:
        return "".join(self.texts)


def _chat_events(generation: Generation) -> Callable[[TextChunk], list[reply.ChunkChoice]]:
    spell = generation.service.model.tokenizer.token_bytes
    greeted: set[int] = set()

    def make(chunk: TextChunk) -> list[reply.ChunkChoice]:
        made: list[reply.ChunkChoice] = []
        if chunk.index not in greeted:
            greeted.add(chunk.index)
            made.append(reply.ChunkChoice(chunk.index, reply.Delta("assistant", "")))
        logprobs = reply.chat_logprobs(chunk.tokens, spell)
        if chunk.text or logprobs is not None:
            made.append(reply.ChunkChoice(chunk.index, reply.Delta(content=chunk.text), logprobs))
        if chunk.finish_reason is not None:
            # Apart from the text, as OpenAI does: an empty delta that only says why.
            made.append(reply.ChunkChoice(chunk.index, reply.Delta(), None, chunk.finish_reason.value))
        return made

    return make


def _text_events(generation: Generation) -> Callable[[TextChunk], list[reply.TextChoice]]:
    spell = generation.service.model.tokenizer.token_bytes
    offsets: dict[int, int] = {}

    def make(chunk: TextChunk) -> list[reply.TextChoice]:
        offset = offsets.get(chunk.index, 0)
        logprobs = reply.completion_logprobs(chunk.tokens, spell, offset)
        if logprobs is not None:
            offsets[chunk.index] = offset + sum(map(len, logprobs.tokens))
        if not chunk.text and logprobs is None and chunk.finish_reason is None:
            return []
        finish = None if chunk.finish_reason is None else chunk.finish_reason.value
        return [reply.TextChoice(chunk.index, chunk.text, logprobs, finish)]

    return make


def _check_model(service: TextService, name: str | None) -> None:
    if name == "":  # over gRPC the same as none; here somebody sent it
        raise UnknownModel(f"model '' is not served here; this is {service.model.name!r}", field="model")
    prompts.check_model(service.model, name or "")


def _request(
    service: TextService, caller: Caller, token_ids: Sequence[int], sampling: SamplingParams, num_samples: int
) -> TextRequest:
    return service.fit(
        TextRequest(
            request_id=caller.request_id,
            token_ids=token_ids,
            sampling=sampling,
            num_samples=num_samples,
            tenant=caller.tenant,
            arrived=caller.arrived,
        )
    )


async def _offset(chunks: AsyncGenerator[TextChunk, None], by: int) -> AsyncGenerator[TextChunk, None]:
    async with aclosing(chunks):
        async for chunk in chunks:
            yield chunk if by == 0 else replace(chunk, index=chunk.index + by)


def _now(service: TextService) -> int:
    return math.floor(service.clock.wall())
