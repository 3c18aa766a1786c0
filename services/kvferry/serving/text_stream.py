"""Converts a token stream to text chunks: detokenization, stop strings, several samples, usage.

TokenSource --TokenEvent--> detokenizer --text--> stop strings --text--> answer splitter --TextChunk--> gRPC, HTTP
                 ^                                    |                        |
                 +------- closed on a match, or after the last call to report

Only answers that may contain reasoning or tool calls have a splitter.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext
from dataclasses import replace

from kvferry.core.clock import Clock
from kvferry.core.errors import InvariantBroken
from kvferry.core.inference.beams import BeamParams
from kvferry.core.inference.chunks import StopReason, TextChunk, Usage
from kvferry.core.sampling import FinishReason, SampledToken
from kvferry.serving import beam_search
from kvferry.serving.merging import merge
from kvferry.serving.request import Request
from kvferry.serving.text_model import TextModel
from kvferry.serving.token_source import SearchSource, TokenEvent, TokenSource
from kvferry.text.answers.answer import AnswerSplitter, SplitOptions
from kvferry.text.answers.pieces import Parts
from kvferry.text.requests.output_text import OutputText

MAX_RUNNING_SAMPLES = 16
"""Maximum number of concurrent samples of a request, so that the request does not delay others."""


async def generate_text(
    source: TokenSource, model: TextModel, request: Request, clock: Clock, searches: SearchSource | None = None
) -> AsyncGenerator[TextChunk, None]:
    """Generate all samples of `request`; their chunks are interleaved, each sample's chunks are in order.

    Close the generator (`contextlib.aclosing`) to stop early; this also stops the generation of every sample.

    Args:
        source: generates the tokens of a sample.
        model: tokenizer and limits.
        request: the request: prompt, sampling parameters and number of samples.
        clock: clock of the timing.
        searches: computes the steps of beam searches; with `None`, each step is a stream of `source`.

    Raises:
        KvferryError: the source failed; the other samples are stopped.
    """
    if request.beams is not None:
        with nullcontext(source) if searches is None else searches.search(request, request.beams.width) as steps:
            outputs = await _beams(steps, model, request, request.beams, clock)
        for chunk in outputs:
            yield chunk
        return
    if request.num_samples == 1:
        async with aclosing(_sample(source, model, request, 0, clock)) as chunks:
            async for chunk in chunks:
                yield chunk
        return
    samples = [_sample(source, model, request, index, clock) for index in range(request.num_samples)]
    async with aclosing(merge(samples, at_once=MAX_RUNNING_SAMPLES)) as chunks:
        async for chunk in chunks:
            yield chunk


async def _beams(
    source: TokenSource, model: TextModel, request: Request, params: BeamParams, clock: Clock
) -> list[TextChunk]:
    """Return the best outputs of a beam search, each as one chunk; the sample's index is its rank."""
    sampling = request.sampling
    found = await beam_search.search(source, request, params, model.eos_token_ids)
    timing = replace(found.timing, total_seconds=clock.monotonic() - request.caller.arrived)
    marks = {} if request.split is None else model.answer_form.marks.by_token
    chunks: list[TextChunk] = []
    num_returned = 0
    for index, beam in enumerate(found.beams[: request.num_samples]):
        writer = OutputText(sampling, model.new_detokenizer(not sampling.skip_special_tokens, marks), None)
        splitter = None if request.split is None else AnswerSplitter(model.answer_form, request.split)
        event = TokenEvent(tuple(map(SampledToken, beam.tokens)), beam.finish_reason)
        parts, kept, finish, _ = _added(event, writer, splitter, request.split)
        usage = Usage(len(request.token_ids), len(kept), found.num_cached_tokens)
        num_returned += len(kept)
        chunks.append(
            TextChunk(
                index, parts.content, kept, finish, usage, timing, reasoning=parts.reasoning, tool_calls=parts.calls
            )
        )
    best = chunks[0]
    assert best.usage is not None, "an output has its usage"
    chunks[0] = replace(best, usage=replace(best.usage, unreturned_tokens=found.num_tokens - num_returned))
    return chunks


async def _sample(
    source: TokenSource, model: TextModel, request: Request, index: int, clock: Clock
) -> AsyncGenerator[TextChunk, None]:
    one = request if index == request.sample_index else replace(request, sample_index=index)
    sampling, form = request.sampling, model.answer_form
    stops = model.new_stop_matcher(sampling.stop) if sampling.stop else None
    marks = {} if request.split is None else form.marks.by_token
    writer = OutputText(sampling, model.new_detokenizer(not sampling.skip_special_tokens, marks), stops)
    splitter = None if request.split is None else AnswerSplitter(form, request.split)
    num_output = 0
    async with aclosing(source.stream(one)) as events:
        async for event in events:
            parts, kept, finish, stop_reason = _added(event, writer, splitter, request.split)
            num_output += len(kept)
            chunk = TextChunk(
                index,
                parts.content,
                kept,
                finish,
                prompt_logprobs=event.prompt_logprobs,
                reasoning=parts.reasoning,
                tool_calls=parts.calls,
            )
            if finish is None:
                yield chunk
                continue
            usage = Usage(len(request.token_ids), num_output, event.num_cached_tokens)
            timing = replace(event.timing, total_seconds=clock.monotonic() - request.caller.arrived)
            yield replace(chunk, usage=usage, timing=timing, stop_reason=stop_reason)
            return
    raise InvariantBroken(
        f"a token stream of {request.caller.request_id} ended after {num_output} tokens without a reason"
    )


def _added(
    event: TokenEvent, writer: OutputText, splitter: AnswerSplitter | None, split: SplitOptions | None
) -> tuple[Parts, tuple[SampledToken, ...], FinishReason | None, StopReason]:
    """Return the parts of the text that an event adds, its tokens up to the end of the sample, and the reasons if the
    sample has ended."""
    parts, kept, stop_reason = Parts(""), tuple[SampledToken, ...](), None
    finish: FinishReason | None = None
    for group in _groups(event.tokens, split):
        is_last = len(kept) + len(group) == len(event.tokens)
        text, added, finish, stop_reason = writer.add(group, event.finish_reason if is_last else None)
        kept += added
        more = Parts(text)
        if splitter is not None:
            more, finish = _split(splitter, text, finish)
        parts = _joined(parts, more)
        if finish is not None:
            break
    return parts, kept, finish, stop_reason


def _split(splitter: AnswerSplitter, text: str, finish: FinishReason | None) -> tuple[Parts, FinishReason | None]:
    """Return the parts of a step's text, and the finish reason if the sample has ended."""
    parts = splitter.feed(text)
    if finish is None and splitter.is_complete:
        finish = FinishReason.STOP
    elif finish is not None:
        parts = _joined(parts, splitter.finish())
    return parts, finish


def _groups(tokens: tuple[SampledToken, ...], split: SplitOptions | None) -> list[tuple[SampledToken, ...]]:
    """Return the tokens of a message in the groups that are split together. If the sample ends with its last call, each
    token is a group, so that the number of its tokens does not depend on how the worker grouped them."""
    if split is None or split.max_calls is None or len(tokens) < 2:
        return [tokens]
    return [tokens[number : number + 1] for number in range(len(tokens))]


def _joined(first: Parts, second: Parts) -> Parts:
    return Parts(first.content + second.content, first.reasoning + second.reasoning, (*first.calls, *second.calls))
