"""The steps of one beam search: they are served like samples, and recorded as parts of one request."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing
from dataclasses import replace

from kvferry.core.errors import DeadlinePassed
from kvferry.gateway.decide.lifecycle.sample_run import NO_TRACE, SampleRun
from kvferry.serving.request import Request
from kvferry.serving.token_source import TokenEvent

_MAX_ROUTES = 16
"""Maximum number of routing decisions in the record of a search: those of its first step, and of repeated steps."""


class SearchSteps:
    """Implements `TokenSource` for the steps of one search, each a request for one token."""

    def __init__(
        self,
        search: SampleRun,
        serve: Callable[[SampleRun], AsyncGenerator[TokenEvent, None]],
        lifetime: Callable[[SampleRun], AbstractContextManager[None]],
    ) -> None:
        """
        Args:
            search: the record of the whole search. It receives the timing of the first step, and the tokens of the most
                probable beam.
            serve: generates the tokens of a step.
            lifetime: returns a context manager that ends the record of a step on exit.
        """
        self._search = search
        self._serve = serve
        self._lifetime = lifetime
        self._is_begun = False
        self._rank = (0, 0)

    async def stream(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Compute a step; see `serving.token_source.TokenSource.stream`.

        Raises:
            DeadlinePassed: the deadline passed before the search ended; the message says after how many tokens.
        """
        is_first, self._is_begun = not self._is_begun, True
        step = SampleRun(request, is_step=True, trace=self._search.trace if is_first else NO_TRACE)
        try:
            with self._lifetime(step):
                async with aclosing(self._serve(step)) as events:
                    async for event in events:
                        yield event
        except DeadlinePassed as error:
            raise DeadlinePassed(
                f"the deadline passed after {len(self._search.emitted)} of {self._search.request.sampling.max_tokens} "
                "tokens of each beam"
            ) from error
        finally:
            self._note(step, is_first=is_first)

    def _note(self, step: SampleRun, *, is_first: bool) -> None:
        """Add an ended step to the record of the search."""
        search, request = self._search, step.request
        search.last_error = step.last_error or search.last_error
        if is_first:
            search.timing = replace(step.timing, total_seconds=0.0)
            search.num_cached_tokens, search.num_loaded_tokens = step.num_cached_tokens, step.num_loaded_tokens
            search.num_written_tokens = step.num_written_tokens
        search.note_computed(step.computed)
        if is_first or len(step.routes) > 1:
            search.routes = [*search.routes, *step.routes][:_MAX_ROUTES]
        rank = len(request.token_ids), -request.sample_index  # the most probable beam is the first one of its round
        if step.emitted and rank > self._rank:
            self._rank = rank
            search.emitted = [*request.token_ids[len(search.request.token_ids) :], *step.emitted]
