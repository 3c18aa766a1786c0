"""Outputs of the offline API: completions as a whole or in parts, vectors and outputs of beam searches."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import InvariantBroken
from kvferry.core.inference.chunks import StopReason, TextChunk
from kvferry.core.inference.tool_calls import AssembledCalls, CallDelta, ToolCall
from kvferry.core.sampling import FinishReason, SampledToken, ScoredToken
from kvferry.serving.request import Request


@dataclass(frozen=True, slots=True)
class Completion:
    """Completion of one prompt."""

    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    logprobs: tuple[SampledToken, ...] = ()
    """The sampled tokens with their log-probabilities; empty unless requested."""
    stop_reason: StopReason = None
    """The stop string or stop token id that ended the text; `None` if neither did."""
    prompt_logprobs: tuple[ScoredToken, ...] | None = None
    """Log-probabilities of the prompt's tokens from the second one on; `None` unless requested."""
    reasoning_content: str = ""
    """Reasoning before the answer of a conversation; not part of `text`."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls in the answer of a conversation; not part of `text`."""


@dataclass(frozen=True, slots=True)
class CompletionPart:
    """Part of a completion that one step added."""

    text: str
    """Text of complete characters; lags behind `token_ids` while its end may be the start of a stop string."""
    token_ids: tuple[int, ...]
    reasoning_content: str = ""
    tool_calls: tuple[CallDelta, ...] = ()
    completion: Completion | None = None
    """The whole completion; only in the last part."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason why the completion ended; only in the last part."""
        return None if self.completion is None else self.completion.finish_reason


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """Pooled vector of one prompt."""

    prompt_token_ids: tuple[int, ...]
    embedding: npt.NDArray[np.float32]
    """[dimensions] values of the vector."""
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class BeamOutput:
    """One output of a beam search."""

    text: str
    """Text of the output; empty if the model has no tokenizer."""
    token_ids: tuple[int, ...]
    cumulative_logprob: float
    """Sum of the log-probabilities of the tokens."""
    score: float
    """The sum divided by the length to the power of the length penalty; outputs are ordered by this score."""
    finish_reason: FinishReason


async def parts(request: Request, chunks: AsyncGenerator[TextChunk, None]) -> AsyncGenerator[CompletionPart, None]:
    """Yield the parts of a completion; the last one has the whole.

    Args:
        request: the request, with one sample.
        chunks: its text.

    Raises:
        KvferryError: the generation failed.
        InvariantBroken: the text ended without a reason.
    """
    text: list[str] = []
    reasoning: list[str] = []
    tokens: list[SampledToken] = []
    calls = AssembledCalls()
    scores: tuple[ScoredToken, ...] | None = None
    async with aclosing(chunks):
        async for chunk in chunks:
            text.append(chunk.text)
            reasoning.append(chunk.reasoning)
            tokens += chunk.tokens
            calls.add(chunk.tool_calls)
            scores = chunk.prompt_logprobs or scores
            whole = None
            if chunk.finish_reason is not None:
                assert chunk.usage is not None, "the last chunk has its usage"
                whole = Completion(
                    prompt_token_ids=tuple(request.token_ids),
                    text="".join(text),
                    token_ids=tuple(token.token_id for token in tokens),
                    finish_reason=chunk.finish_reason,
                    num_cached_tokens=chunk.usage.cached_tokens,
                    logprobs=tuple(tokens) if request.sampling.logprobs is not None else (),
                    stop_reason=chunk.stop_reason,
                    prompt_logprobs=scores,
                    reasoning_content="".join(reasoning),
                    tool_calls=calls.whole(),
                )
            ids = tuple(token.token_id for token in chunk.tokens)
            yield CompletionPart(chunk.text, ids, chunk.reasoning, chunk.tool_calls, whole)
            if whole is not None:
                return
    raise InvariantBroken(f"request {request.caller.request_id} has not ended")


async def completed(request: Request, chunks: AsyncGenerator[TextChunk, None]) -> Completion:
    """Return the whole completion; see `parts`."""
    async with aclosing(parts(request, chunks)) as found:
        async for part in found:
            if part.completion is not None:
                return part.completion
    raise InvariantBroken(f"request {request.caller.request_id} has not ended")
