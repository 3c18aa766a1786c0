"""From a stream of tokens to streams of text: detokenizing, stop strings, several samples, usage.

TokenSource --TokenEvent--> detokenizer --text--> stop strings --TextChunk--> gRPC, HTTP
                 ^                                    |
                 +------------- closed on a match ----+
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from kvferry.core.clock import Clock
from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import RequestId
from kvferry.core.sampling import FinishReason, SampledToken, SamplingParams
from kvferry.rpc.merging import merge
from kvferry.rpc.text_model import TextModel
from kvferry.rpc.token_source import Timing, TokenEvent, TokenRequest, TokenSource


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A checked request: every sample of it can run (`rpc.prompts` makes it)."""

    request_id: RequestId
    token_ids: Sequence[int]
    sampling: SamplingParams
    """`max_tokens` and `seed` are set."""
    num_samples: int = 1
    tenant: str = ""
    arrived: float = 0.0
    """Monotonic seconds."""
    deadline: float | None = None
    """Monotonic seconds."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that one sample took."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Of the prompt, not computed for this request."""


@dataclass(frozen=True, slots=True)
class TextChunk:
    """What one step added to one sample."""

    index: int
    """Which sample, from 0."""
    text: str
    """Complete characters; may lag behind the tokens while a stop string might be forming."""
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None = None
    """Set on the sample's last chunk, with the two below."""
    usage: Usage | None = None
    timing: Timing | None = None


async def generate_text(
    source: TokenSource, model: TextModel, request: TextRequest, clock: Clock
) -> AsyncGenerator[TextChunk, None]:
    """All samples of `request`, their chunks interleaved as they come, each sample's in order.

    Close the generator (`contextlib.aclosing`) to stop early: every sample is then stopped upstream.

    Raises:
        KvferryError: what the source raised; the other samples are stopped.
    """
    if request.num_samples == 1:
        async with aclosing(_sample(source, model, request, 0, clock)) as chunks:
            async for chunk in chunks:
                yield chunk
        return
    samples = [_sample(source, model, request, index, clock) for index in range(request.num_samples)]
    async with aclosing(merge(samples)) as chunks:
        async for chunk in chunks:
            yield chunk


async def _sample(
    source: TokenSource, model: TextModel, request: TextRequest, index: int, clock: Clock
) -> AsyncGenerator[TextChunk, None]:
    tokens = TokenRequest(
        request_id=request.request_id,
        token_ids=request.token_ids,
        sampling=request.sampling,
        sample_index=index,
        tenant=request.tenant,
        arrived=request.arrived,
        deadline=request.deadline,
    )
    writer = _Writer(model, request.sampling)
    num_output = 0
    async with aclosing(source.stream(tokens)) as events:
        async for event in events:
            text, kept, finish = writer.write(event)
            num_output += len(kept)
            if finish is None:
                yield TextChunk(index, text, kept)
                continue
            usage = Usage(len(request.token_ids), num_output, event.num_cached_tokens)
            timing = replace(event.timing, total_seconds=clock.monotonic() - request.arrived)
            yield TextChunk(index, text, kept, finish, usage, timing)
            return
    raise InvariantBroken(f"a token stream of {request.request_id} ended after {num_output} tokens without a reason")


class _Writer:
    """One sample's text: tokens in, text out, a verdict on whether a stop string ended it."""

    def __init__(self, model: TextModel, sampling: SamplingParams) -> None:
        self._detokenizer = model.new_detokenizer()
        self._stop = model.new_stop_matcher(sampling.stop) if sampling.stop else None

    def write(self, event: TokenEvent) -> tuple[str, tuple[SampledToken, ...], FinishReason | None]:
        """Text that may be shown, the tokens that count, and why the sample ended if it did."""
        shown: list[str] = []
        for position, token in enumerate(event.tokens, start=1):
            shown.append(self._filter(self._detokenizer.feed((token.token_id,))))
            if self._matched:  # tokens of the same step after the stop string were never asked for
                return "".join(shown), event.tokens[:position], FinishReason.STOP
        finish = event.finish_reason
        if finish is not None:
            shown.append(self._filter(self._detokenizer.finish()))
            if self._matched:
                finish = FinishReason.STOP
            elif self._stop is not None:
                shown.append(self._stop.finish())
        return "".join(shown), event.tokens, finish

    def _filter(self, text: str) -> str:
        return text if self._stop is None else self._stop.feed(text)

    @property
    def _matched(self) -> bool:
        return self._stop is not None and self._stop.matched is not None
