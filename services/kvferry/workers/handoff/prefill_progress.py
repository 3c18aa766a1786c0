"""The prefill side of a KV prefetch: reports full blocks of running prompts to followers.

A prompt is identified by the ticket id of its future offer. Followers are notified of full blocks and may read them,
but no pages are pinned for followers.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from kvferry.engine.schedule.step.kv_jobs import NewBlocks

_MAX_FOLLOWERS = 4
_BEGIN_SECONDS = 0.5


@dataclass(slots=True)
class _Prompt:
    reports: list[NewBlocks] = field(default_factory=list)
    is_over: bool = False
    num_followers: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def notify(self) -> None:
        news, self.news = self.news, asyncio.Event()
        news.set()


class PrefillProgress:
    """The prompts that a worker is computing, and their followers. Used only on the event loop's thread."""

    def __init__(self) -> None:
        self._prompts: dict[str, _Prompt] = {}
        self._begun = asyncio.Event()

    @contextmanager
    def computing(self, ticket_id: str) -> Iterator[None]:
        """Make a prompt available to followers within the `with` block."""
        # Without a unique ticket id, followers cannot identify the prompt.
        if not ticket_id or ticket_id in self._prompts:
            yield
            return
        prompt = self._prompts[ticket_id] = _Prompt()
        begun, self._begun = self._begun, asyncio.Event()
        begun.set()
        try:
            yield
        finally:
            del self._prompts[ticket_id]
            prompt.is_over = True
            prompt.notify()

    def add(self, ticket_id: str, progress: NewBlocks) -> None:
        """Report new full blocks of a prompt to its followers.

        Args:
            ticket_id: id that the prompt's ticket will have.
            progress: the new full blocks; ignored if no decode worker follows the prompt.
        """
        prompt = self._prompts.get(ticket_id)
        if prompt is not None:
            prompt.reports.append(progress)
            prompt.notify()

    async def follow(self, ticket_id: str) -> AsyncGenerator[NewBlocks, None]:
        """Yield all reports of a prompt until it ends; return early if the prompt does not start in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_BEGIN_SECONDS):  # the follower may start before the prompt
                while ticket_id not in self._prompts:
                    await self._begun.wait()
        prompt = self._prompts.get(ticket_id)
        if prompt is None or prompt.num_followers >= _MAX_FOLLOWERS:
            return
        prompt.num_followers += 1
        try:
            seen = 0
            while True:
                news = prompt.news
                for progress in prompt.reports[seen:]:
                    yield progress
                    seen += 1
                if prompt.is_over and seen == len(prompt.reports):
                    return
                if seen == len(prompt.reports):
                    await news.wait()
        finally:
            prompt.num_followers -= 1
