"""Keeps a fleet to what its source says, and says itself how well that is known."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

from kvferry.gateway.discovery import News, Source
from kvferry.gateway.fleet import Fleet

_log = logging.getLogger(__name__)
_AGAIN_SECONDS = 1.0


class Knowledge(StrEnum):
    """How well it is known who the workers are."""

    LISTED = "listed"
    """They were given at the start and never change."""
    UNKNOWN = "unknown"
    """The source has not said yet."""
    FOLLOWED = "followed"
    """The source tells of each change."""
    STALE = "stale"
    """The source fails; these are the last that it told of."""


@dataclass(frozen=True, slots=True)
class SourceState:
    """A source at one moment."""

    state: Knowledge
    detail: str = ""
    """Why it is not followed."""


class Membership:
    """One fleet and its source. `run` is a task of its own."""

    def __init__(self, fleet: Fleet, source: Source | None) -> None:
        """
        Args:
            source: `None`: the fleet's members are listed in its configuration.
        """
        self._fleet = fleet
        self._source = source
        self._has_heard = False
        self._trouble = ""

    @property
    def state(self) -> SourceState:
        """How well it is known now."""
        if self._source is None:
            return SourceState(Knowledge.LISTED)
        if not self._has_heard:
            return SourceState(Knowledge.UNKNOWN, self._trouble or "nothing was heard of the pool yet")
        return SourceState(Knowledge.STALE if self._trouble else Knowledge.FOLLOWED, self._trouble)

    def notes(self) -> list[str]:
        """What there is to say about it; nothing while all is well."""
        now = self.state
        if not now.detail:
            return []
        stale = "; the workers known last are used" if now.state is Knowledge.STALE else ""
        return [f"pool: {now.detail}{stale}"]

    async def run(self) -> None:
        """Follow the source until cancelled; nothing to do where there is none."""
        while self._source is not None:
            try:
                # An async generator, whatever the protocol calls it: closing it ends the source's thread.
                stream = cast("AsyncGenerator[News, None]", self._source.news())
                async with aclosing(stream) as told:
                    async for news in told:
                        self._take(news)
                self._hear_trouble("the source ended")
            except Exception as error:  # the last known members serve on, whatever it is
                _log.exception("the source of workers failed unexpectedly")
                self._hear_trouble(f"{type(error).__name__}: {error}")
            await asyncio.sleep(_AGAIN_SECONDS)

    def _take(self, news: News) -> None:
        if news.listings is not None:
            self._has_heard = True
            self._fleet.follow(news.listings)
        self._hear_trouble(news.trouble)

    def _hear_trouble(self, trouble: str) -> None:
        if trouble and not self._trouble:
            _log.warning("who the workers are may be old: %s", trouble)
        elif self._trouble and not trouble:
            _log.info("who the workers are is known again")
        self._trouble = trouble
