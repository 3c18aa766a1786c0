"""A source of tokens that records them, and begins with those that a record has."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from kvferry.core.errors import ResumeRefused
from kvferry.core.inference.chunks import Timing
from kvferry.gateway.resume.event_ids import EventId, EventPart
from kvferry.gateway.resume.stream_records import StreamRecord
from kvferry.gateway.resume.token_batches import RecordedTokens
from kvferry.serving.request import Request
from kvferry.serving.token_source import TokenEvent, TokenSource

_TOKENS_AT_ONCE = 128
"""Number of recorded tokens that are converted to text between two turns of the event loop."""


class Boundary:
    """Divides events so that one ends where the client's position is."""

    def __init__(self, after: EventId | None) -> None:
        """
        Args:
            after: id of the last event that the client has; `None` for a new stream.
        """
        self._left = 0 if after is None else after.num_tokens
        self._keeps_end = after is not None and after.part is not EventPart.TEXT

    def divided(self, event: TokenEvent) -> Iterator[TokenEvent]:
        """Return an event, in two parts if the client has the first one only. If the client has all tokens but not the
        end, the end is an event without tokens."""
        left, count = self._left, len(event.tokens)
        self._left = max(0, left - count)
        is_split = 0 < left < count or (left == count > 0 and event.finish_reason is not None and not self._keeps_end)
        if not is_split:
            yield event
            return
        yield replace(event, tokens=event.tokens[:left], finish_reason=None)
        yield replace(event, tokens=event.tokens[left:], prompt_logprobs=None)


@dataclass(frozen=True, slots=True)
class RecordedSource:
    """Implements `TokenSource` for one stream."""

    inner: TokenSource
    """Generates the tokens that the record has not; it continues after `Request.prior_ids`."""
    record: StreamRecord
    prior: RecordedTokens = field(default_factory=RecordedTokens)
    """Tokens of the record."""
    after: EventId | None = None
    """Id of the last event that the client has; `None` for a new stream."""

    async def stream(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Yield the record's tokens, then further ones; see `TokenSource.stream`.

        Raises:
            ResumeRefused: while iterating: another gateway continues the stream.
        """
        boundary, prior = Boundary(self.after), self.prior
        for event in _events(prior):
            for part in boundary.divided(event):
                yield part
            await asyncio.sleep(0)
        if prior.finish_reason is not None:
            return
        if prior.tokens:
            request = replace(request, prior_ids=tuple(token.token_id for token in prior.tokens))
        record = self.record
        async with aclosing(self.inner.stream(request)) as events:
            async for event in events:
                if record.is_fenced:
                    raise ResumeRefused("the stream is continued by another gateway, where its client reconnected")
                record.add(event)
                if self.after is None:
                    yield event
                    continue
                if prior.tokens:
                    event = replace(event, num_cached_tokens=prior.num_cached, num_written_tokens=prior.num_written)
                for part in boundary.divided(event):
                    yield part


def _events(prior: RecordedTokens) -> Iterator[TokenEvent]:
    """Return recorded tokens as events; the last one has the finish reason."""
    tokens = prior.tokens
    if not tokens and prior.finish_reason is None:
        return
    starts = range(0, max(1, len(tokens)), _TOKENS_AT_ONCE)
    for start in starts:
        finish = prior.finish_reason if start == starts[-1] else None
        part = tokens[start : start + _TOKENS_AT_ONCE]
        yield TokenEvent(part, finish, prior.num_cached, Timing(), None, prior.num_written)
