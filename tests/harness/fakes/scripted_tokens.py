"""Tokens from a rule instead of a model: each depends on all earlier tokens, so that an incorrect resumption is
detected."""

import asyncio
import zlib
from collections.abc import AsyncGenerator, Sequence

import numpy as np
import numpy.typing as npt

from harness.fakes.byte_model import HIDDEN_SIZE
from kvferry.core.inference.chunks import Timing
from kvferry.core.inference.pooling import Pooling, PoolingParams
from kvferry.core.sampling import FinishReason, SampledToken, SamplingParams, ScoredToken
from kvferry.serving.request import Request
from kvferry.serving.token_source import TokenEvent, Vector


def next_token(tokens: Sequence[int], sampling: SamplingParams, sample_index: int) -> SampledToken:
    """Return the token that follows `tokens`: a letter from a to z, derived from a checksum of all arguments."""
    state = f"{list(tokens)}/{sampling.seed}/{sample_index}"
    token = ord("a") + zlib.crc32(state.encode()) % 26
    if sampling.logprobs is None:
        return SampledToken(token)
    top = tuple((token if rank == 0 else ord("A") + rank, -0.5 - rank) for rank in range(sampling.logprobs))
    return SampledToken(token, -0.5, top)


def scores_of(prompt: Sequence[int], sampling: SamplingParams) -> tuple[ScoredToken, ...] | None:
    """Return the scored tokens of a prompt, by a rule; `None` if the request did not set `prompt_logprobs`."""
    if sampling.prompt_logprobs is None:
        return None
    top = tuple((ord("A") + rank, -0.5 - rank) for rank in range(sampling.prompt_logprobs))
    return tuple(ScoredToken(token, -0.5 * position, position, top) for position, token in enumerate(prompt[1:], 1))


def expected_tokens(prompt: Sequence[int], sampling: SamplingParams, count: int, sample_index: int = 0) -> list[int]:
    """Return the `count` tokens that the rule generates after `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, sampling, sample_index).token_id)
    return tokens[len(prompt) :]


def vector_of(tokens: Sequence[int], params: PoolingParams) -> npt.NDArray[np.float32]:
    """Return a vector of a prompt, by a rule: counts of its tokens by their remainder, and its length."""
    counts = np.bincount([token % (HIDDEN_SIZE - 1) for token in tokens], minlength=HIDDEN_SIZE).astype(np.float64)
    counts[-1] = len(tokens) / 7 + {Pooling.LAST: 0, Pooling.MEAN: 1, Pooling.CLS: 2}[params.pooling]
    kept = counts[: params.dimensions]
    return (kept / (np.linalg.norm(kept) or 1.0) if params.normalize else kept).astype(np.float32)


class ScriptedSource:
    """An in-process `TokenSource` that generates tokens by the rule."""

    def __init__(self, *, text: str | None = None) -> None:
        """
        Args:
            text: bytes to generate instead of the rule's tokens, followed by an end-of-sequence token.
        """
        self._text = text
        self.open_streams = 0
        self.num_yielded = 0

    async def pool(self, request: Request, params: PoolingParams) -> Vector:
        self.open_streams += 1
        try:
            await asyncio.sleep(0)
            return Vector(vector_of(request.token_ids, params), len(request.token_ids))
        finally:
            self.open_streams -= 1

    async def stream(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        self.open_streams += 1
        try:
            limit = request.sampling.max_tokens
            assert limit is not None
            tokens = list(request.token_ids)
            for count in range(1, limit + 1):
                await asyncio.sleep(0)
                if self._text is not None and count > len(self._text.encode()):
                    yield TokenEvent((), FinishReason.STOP)
                    return
                token = (
                    next_token(tokens, request.sampling, request.sample_index)
                    if self._text is None
                    else SampledToken(self._text.encode()[count - 1])
                )
                tokens.append(token.token_id)
                self.num_yielded += 1
                finish = FinishReason.LENGTH if count == limit else None
                scores = scores_of(request.token_ids, request.sampling) if count == 1 else None
                timing = Timing(prefill_worker="here")
                yield TokenEvent((token,), finish, 3, timing, scores, num_written_tokens=1)
        finally:
            self.open_streams -= 1
