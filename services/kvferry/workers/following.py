"""Who follows which prompt while it is computed: the prefill side of a head start.

A prompt that may be followed is known by the ticket id its offer will have. Nothing is held for followers; they are
told of blocks as they become full, and read them or not.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from kvferry.engine.jobs import Progress

_MAX_FOLLOWERS = 4
_BEGIN_SECONDS = 0.5


@dataclass(slots=True)
class _Prompt:
    told: list[Progress] = field(default_factory=list)
    is_over: bool = False
    num_followers: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self) -> None:
        news, self.news = self.news, asyncio.Event()
        news.set()


class Following:
    """All prompts that one worker computes now. Used on the event loop's thread only."""

    def __init__(self) -> None:
        self._prompts: dict[str, _Prompt] = {}
        self._begun = asyncio.Event()

    @contextmanager
    def computing(self, ticket_id: str) -> Iterator[None]:
        """A prompt that can be followed within the `with` block."""
        if not ticket_id or ticket_id in self._prompts:  # no name to follow it by
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
            prompt.tell()

    def add(self, ticket_id: str, progress: Progress) -> None:
        """Further blocks are full."""
        prompt = self._prompts.get(ticket_id)
        if prompt is not None:
            prompt.told.append(progress)
            prompt.tell()

    async def follow(self, ticket_id: str) -> AsyncGenerator[Progress, None]:
        """What was told of a prompt so far, and what is told of it, until it is done; one that does not begin is."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_BEGIN_SECONDS):  # the follower may be quicker than the prompt
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
                for progress in prompt.told[seen:]:
                    yield progress
                    seen += 1
                if prompt.is_over and seen == len(prompt.told):
                    return
                if seen == len(prompt.told):
                    await news.wait()
        finally:
            prompt.num_followers -= 1
