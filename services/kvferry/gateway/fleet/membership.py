"""Updates a fleet from service discovery and reports whether the listings are current."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

from kvferry.gateway.decide.routing.discovery import DiscoverySource, Update
from kvferry.gateway.fleet.fleet import Fleet

_log = logging.getLogger(__name__)
_AGAIN_SECONDS = 1.0


class Knowledge(StrEnum):
    """State of the list of workers: fixed, followed, outdated, or not read yet."""

    LISTED = "listed"
    """The workers are listed in the configuration and never change."""
    UNKNOWN = "unknown"
    """The source has not reported any listing yet."""
    FOLLOWED = "followed"
    """The source reports every change."""
    STALE = "stale"
    """The source is failing; the last known workers are used."""


@dataclass(frozen=True, slots=True)
class SourceState:
    """Whether the listings of a source are current, with the reason if they are not."""

    state: Knowledge
    detail: str = ""
    """Reason why `state` is not `FOLLOWED`."""


class Membership:
    """Updates one fleet from its source. `run` is a background task."""

    def __init__(self, fleet: Fleet, source: DiscoverySource | None) -> None:
        """
        Args:
            fleet: the fleet to which workers are added and from which they are removed.
            source: yields the workers; `None` if they are listed in the fleet's configuration.
        """
        self._fleet = fleet
        self._source = source
        self._has_listings = False
        self._failure = ""

    @property
    def state(self) -> SourceState:
        """Current state of the list of workers."""
        if self._source is None:
            return SourceState(Knowledge.LISTED)
        if not self._has_listings:
            return SourceState(Knowledge.UNKNOWN, self._failure or "the pool has not been read yet")
        return SourceState(Knowledge.STALE if self._failure else Knowledge.FOLLOWED, self._failure)

    def notes(self) -> list[str]:
        """Return the problems of the source, for `/ready`; empty if there are none."""
        now = self.state
        if not now.detail:
            return []
        stale = "; the last known workers are used" if now.state is Knowledge.STALE else ""
        return [f"pool: {now.detail}{stale}"]

    async def run(self) -> None:
        """Follow the source until cancelled; return immediately if there is no source."""
        while self._source is not None:
            try:
                # The protocol declares an iterator, but this is an async generator: closing it stops the source's
                # thread.
                stream = cast("AsyncGenerator[Update, None]", self._source.updates())
                async with aclosing(stream) as updates:
                    async for update in updates:
                        self._take(update)
                self._note_failure("the source ended")
            except Exception as error:  # requests continue with the last known workers
                _log.exception("service discovery failed unexpectedly; it is started again")
                self._note_failure(f"{type(error).__name__}: {error}")
            await asyncio.sleep(_AGAIN_SECONDS)

    def _take(self, update: Update) -> None:
        if update.listings is not None:
            self._has_listings = True
            self._fleet.follow(update.listings)
        self._note_failure(update.failure)

    def _note_failure(self, failure: str) -> None:
        if failure and not self._failure:
            _log.warning("the list of workers may be stale: %s", failure)
        elif self._failure and not failure:
            _log.info("the list of workers is current again")
        self._failure = failure
