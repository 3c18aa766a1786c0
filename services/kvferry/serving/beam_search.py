"""Beam search over a token source: in each round, one request of one token per live beam.

The source caches the KV of each beam, so that a step computes at most the last block of its beam. With separate prefill
and decode workers, a step is a prompt that ends with its first token, and is never handed off.
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from kvferry.core.inference.beams import BeamParams
from kvferry.core.inference.chunks import Timing
from kvferry.serving.request import BeamRound, Request
from kvferry.serving.token_source import TokenEvent, TokenSource
from kvferry.text.requests.beams import Beam, Beams


@dataclass(frozen=True, slots=True)
class FoundBeams:
    """Outputs of a search."""

    beams: list[Beam]
    """At most `width` outputs, the best first."""
    num_cached_tokens: int
    """Number of tokens of the prompt whose KV was cached."""
    num_written_tokens: int
    """Number of tokens of the prompt whose KV was computed and put in a prefix cache."""
    timing: Timing
    """Timing of the first token."""
    num_tokens: int
    """Number of tokens of all beams: `width` for each round."""


async def search(
    source: TokenSource,
    request: Request,
    params: BeamParams,
    eos_token_ids: Sequence[int],
) -> FoundBeams:
    """Search for the best outputs of a prompt. Cancelling the calling task cancels all requests.

    Args:
        source: computes the tokens.
        request: the prompt; of its sampling parameters, only `max_tokens` has an effect.
        params: parameters of the search.
        eos_token_ids: the model's end-of-sequence tokens.

    Raises:
        KvferryError: see `TokenSource.stream`.
    """
    limit = params.max_tokens if request.sampling.max_tokens is None else request.sampling.max_tokens
    beams = Beams(replace(params, max_tokens=min(params.max_tokens, limit)), frozenset(eos_token_ids))
    sampling = params.step_sampling(1)
    number = num_rounds = 0
    first: TokenEvent | None = None
    while not beams.is_done:
        requests = [
            replace(
                request,
                token_ids=[*request.token_ids, *beam.tokens],
                sampling=sampling,
                sample_index=number + index,
            )
            for index, beam in enumerate(beams.live)
        ]
        number += len(requests)
        events = await _all(source, requests)
        num_rounds += 1
        computed = sum(
            len(step.token_ids) - event.num_cached_tokens for step, event in zip(requests, events, strict=True)
        )
        recomputed = 0 if first is None else computed - len(requests)
        first = first or events[0]
        request.on_round(BeamRound(first.num_cached_tokens, recomputed))
        beams.advance([event.tokens[0].top for event in events])
    assert first is not None, "a search has at least one round"
    num_tokens = params.width * num_rounds
    best = beams.best(params.width)
    return FoundBeams(best, first.num_cached_tokens, first.num_written_tokens, first.timing, num_tokens)


async def _all(source: TokenSource, requests: Sequence[Request]) -> list[TokenEvent]:
    """Return the first token of each request. If one fails, the others are cancelled."""
    tasks = [asyncio.create_task(_first(source, request)) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _first(source: TokenSource, request: Request) -> TokenEvent:
    found: TokenEvent | None = None
    async with aclosing(source.stream(request)) as events:
        async for event in events:
            found = event if found is None and event.tokens else found
    assert found is not None, "a stream of one token has this token"
    return found
