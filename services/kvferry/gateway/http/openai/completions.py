"""Responses of OpenAI's chat and text completions: whole responses and event streams."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from kvferry.core.inference.chunks import StopReason, TextChunk, Timing
from kvferry.core.inference.tool_calls import AssembledCalls
from kvferry.core.sampling import FinishReason
from kvferry.gateway.http.openai import reply
from kvferry.gateway.http.openai.generation import Generation
from kvferry.gateway.resume.event_ids import EventIds, EventPart

P = ParamSpec("P")
R = TypeVar("R")


async def answer(generation: Generation) -> tuple[bytes, Timing]:
    """Run the generation; return the whole response as JSON, and the timing of its first choice.

    Raises:
        KvferryError: the generation failed.
    """
    samples: dict[int, _Sample] = {}
    spell = generation.service.model.tokenizer.token_bytes
    usage: reply.UsageObject | None = None
    per_prompt = generation.requests[0].num_samples
    async with aclosing(generation.chunks()) as chunks:
        async for chunk in chunks:
            if chunk.index not in samples:
                samples[chunk.index] = _Sample(generation, chunk.index, [generation.echo(chunk.index)])
            await in_parts(chunk, samples[chunk.index].add, chunk, spell)
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
        whole.prompt_token_ids = generation.prompt_token_ids(0)
    return reply.encode(whole), samples[0].timing


async def events(generation: Generation, ids: EventIds | None = None) -> AsyncGenerator[bytes, None]:
    """Run the generation; yield server-sent events, without the closing `[DONE]`.

    Args:
        generation: the generation.
        ids: ids of the events, and the client's position, before which events are left out; `None` for events without
            ids.

    Raises:
        KvferryError: the generation failed, before or after the first event.
    """
    make = _chat_events(generation) if generation.is_chat else _text_events(generation)
    usage: reply.UsageObject | None = None
    timing: Timing | None = None
    running = RunningUsage(generation)
    is_first = True
    per_prompt = generation.requests[0].num_samples
    async with aclosing(generation.chunks()) as chunks:
        async for chunk in chunks:
            usage = reply.add_usage(usage, chunk, first_sample=chunk.index % per_prompt == 0)
            timing = chunk.timing if chunk.timing is not None and chunk.index == 0 else timing
            if ids is not None:
                ids.add(chunk.tokens, is_last=chunk.finish_reason is not None)
            made = make(chunk) if chunk.prompt_logprobs is None else await in_parts(chunk, make, chunk)
            for choice in made:
                event = generation.reply([choice])
                if generation.form.include_usage:
                    event.usage = running.after(chunk) if generation.form.has_running_usage else None
                if is_first and generation.is_chat:
                    event.prompt_token_ids = generation.prompt_token_ids(0)
                is_first = False
                line = b"" if ids is None else _id_line(ids, choice)
                if line is not None:
                    yield reply.sse(event, line)
    if generation.form.include_usage:
        last = generation.reply([])
        last.usage = usage
        if timing is not None:
            last.kvferry = timing
        line = b"" if ids is None else ids.next(EventPart.USAGE)
        if line is not None:
            yield reply.sse(last, line)


def _id_line(ids: EventIds, choice: reply.Choice) -> bytes | None:
    """Return the line with the id of a choice's event; `None` if the client has the event."""
    if isinstance(choice, reply.ChunkChoice) and choice.delta.role is not None:
        return ids.greeting()
    is_finish = choice.finish_reason is not None
    return ids.next(EventPart.FINISH if is_finish else EventPart.TEXT)


class RunningUsage:
    """Token counts of each choice of a stream so far."""

    def __init__(self, generation: Generation) -> None:
        self._requests = generation.requests
        self._counts: dict[int, int] = {}
        self._last: TextChunk | None = None

    def after(self, chunk: TextChunk) -> reply.UsageObject:
        """Return the usage of the choice of `chunk` up to and including this chunk."""
        if chunk is not self._last:
            self._last = chunk
            self._counts[chunk.index] = self._counts.get(chunk.index, 0) + len(chunk.tokens)
        prompt = len(self._requests[chunk.index // self._requests[0].num_samples].token_ids)
        output = self._counts[chunk.index]
        return reply.UsageObject(prompt, output, prompt + output)


def _echoed_logprobs(
    generation: Generation, chunk: TextChunk, offsets: reply.TextOffsets
) -> reply.CompletionLogprobs | None:
    """Return the log-probabilities of the echoed prompt if `chunk` has them and the response shows them."""
    if not generation.echoes or generation.logprobs is None or chunk.prompt_logprobs is None:
        return None
    prompt = generation.requests[chunk.index // generation.requests[0].num_samples].token_ids
    spell = generation.service.model.tokenizer.token_bytes
    return reply.echoed_logprobs(prompt, chunk.prompt_logprobs, generation.logprobs, spell, offsets)


@dataclass(slots=True)
class _Sample:
    """A sample of a whole response. Log-probabilities are converted as they arrive, since converting all of them at
    once would block the event loop."""

    generation: Generation
    number: int
    """Number of the sample among those of all prompts."""
    texts: list[str]
    """Parts of the text; the first one is the echoed prompt."""
    reasoning: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    tool_calls: AssembledCalls = field(default_factory=AssembledCalls)
    chat_logprobs: reply.ChatLogprobs | None = None
    text_logprobs: reply.CompletionLogprobs | None = None
    prompt_logprobs: reply.PromptLogprobs | UnsetType = UNSET
    offsets: reply.TextOffsets = field(default_factory=reply.TextOffsets)
    score: float = 0.0
    """Cumulative log-probability of the tokens."""
    finish_reason: str = ""
    stop_reason: StopReason = None
    timing: Timing = field(default_factory=Timing)

    def add(self, chunk: TextChunk, spell: reply.TokenBytes) -> None:
        self.texts.append(chunk.text)
        self.reasoning.append(chunk.reasoning)
        self.token_ids += self.generation.output_token_ids(chunk) or ()
        self.tool_calls.add(chunk.tool_calls)
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
        if (echoed := _echoed_logprobs(self.generation, chunk, self.offsets)) is not None:
            self.text_logprobs = echoed
        more = reply.completion_logprobs(chunk.tokens, spell, self.offsets)
        self.text_logprobs = reply.continued(self.text_logprobs, more)

    def choice(self, index: int) -> reply.Choice:
        """Build the response's choice `index`."""
        text = "".join(self.texts)
        token_ids = self.token_ids if self.generation.form.has_token_ids else UNSET
        if self.generation.is_chat:
            custom = self.generation.form.custom_tools
            calls = [reply.call_object(call, custom) for call in self.tool_calls.whole()]
            reasoning = "".join(self.reasoning) or UNSET
            message = reply.ChatMessage(
                text or None if calls else text,
                reasoning=reasoning,
                reasoning_content=reasoning,
                tool_calls=calls or UNSET,
            )
            finish = _finish(self.finish_reason, has_calls=bool(calls))
            chat = reply.ChatChoice(index, message, self.chat_logprobs, finish, self.stop_reason, token_ids)
            return self._with_versions(chat)
        reasons = self.finish_reason, self.stop_reason
        prompt_ids = self.generation.prompt_token_ids(self.number)
        return self._with_versions(
            reply.TextChoice(index, text, self.text_logprobs, *reasons, self.prompt_logprobs, prompt_ids, token_ids)
        )

    def _with_versions(self, choice: reply.Choice) -> reply.Choice:
        if self.generation.form.has_token_ids:
            reply.add_versions(choice, self.timing)
        return choice


def _best(samples: Mapping[int, _Sample], per_prompt: int, num_choices: int | None) -> list[_Sample]:
    """Return the samples of a response, grouped by prompt in order. With `num_choices`, return only this number per
    prompt: the samples with the highest cumulative log-probability, best first.
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
    calling: dict[int, reply.CallParts] = {}

    def make(chunk: TextChunk) -> list[reply.ChunkChoice]:
        made: list[reply.ChunkChoice] = []
        if chunk.index not in greeted:
            greeted.add(chunk.index)
            made.append(reply.ChunkChoice(chunk.index, reply.Delta("assistant", greeting)))
        logprobs = reply.chat_logprobs(chunk.tokens, spell)
        token_ids = generation.output_token_ids(chunk)
        calls: list[reply.ToolCallDelta] = []
        if chunk.tool_calls:
            parts = calling.setdefault(chunk.index, reply.CallParts(generation.form.custom_tools))
            calls = parts.add(chunk.tool_calls)
        if chunk.finish_reason is not None and chunk.index in calling:
            calls += calling[chunk.index].close()
        if chunk.reasoning or chunk.text or calls or logprobs is not None or token_ids:
            reasoning = chunk.reasoning or None
            delta = reply.Delta(
                content=chunk.text or (None if reasoning else greeting),
                reasoning=reasoning,
                reasoning_content=reasoning,
                tool_calls=calls or None,
            )
            made.append(reply.ChunkChoice(chunk.index, delta, logprobs, token_ids=token_ids))
        if chunk.finish_reason is not None:
            # As in OpenAI's API, the finish reason is sent in a separate chunk with an empty delta.
            finish = _finish(chunk.finish_reason.value, has_calls=chunk.index in calling)
            made.append(reply.ChunkChoice(chunk.index, reply.Delta(), None, finish, chunk.stop_reason))
            if generation.form.has_token_ids:
                reply.add_versions(made[-1], chunk.timing)
        return made

    return make


def _finish(reason: str, *, has_calls: bool) -> str:
    """Return OpenAI's finish reason: an answer with calls that is complete ends with `tool_calls`."""
    return "tool_calls" if has_calls and reason == FinishReason.STOP else reason


def _text_events(generation: Generation) -> Callable[[TextChunk], Sequence[reply.Choice]]:
    spell = generation.service.model.tokenizer.token_bytes
    offsets: dict[int, reply.TextOffsets] = {}
    echoed: set[int] = set()

    def make(chunk: TextChunk) -> list[reply.TextChoice]:
        text = chunk.text
        token_ids = generation.output_token_ids(chunk)
        prompt_ids: list[int] | UnsetType = UNSET
        if chunk.index not in echoed:
            echoed.add(chunk.index)
            text = generation.echo(chunk.index) + text
            prompt_ids = generation.prompt_token_ids(chunk.index)
        position = offsets.setdefault(chunk.index, reply.TextOffsets())
        logprobs = _echoed_logprobs(generation, chunk, position)
        logprobs = reply.continued(logprobs, reply.completion_logprobs(chunk.tokens, spell, position))
        if not text and logprobs is None and chunk.finish_reason is None and not token_ids and not prompt_ids:
            return []
        finish = None if chunk.finish_reason is None else chunk.finish_reason.value
        choice = reply.TextChoice(chunk.index, text, logprobs, finish, chunk.stop_reason)
        choice.prompt_token_ids, choice.token_ids = prompt_ids, token_ids
        if generation.form.has_token_ids:
            reply.add_versions(choice, chunk.timing)
        return [choice]

    return make


async def in_parts(chunk: TextChunk, convert: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call `convert`; if the chunk has log-probabilities of a prompt, on a thread, since they may be 65,536 numbers."""
    if chunk.prompt_logprobs is None:
        return convert(*args, **kwargs)
    return await asyncio.to_thread(convert, *args, **kwargs)
