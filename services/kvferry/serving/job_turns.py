"""Turns of jobs that run one at a time, fair between their owners in order and in room.

Order: the owner whose jobs have taken the least time is first, and among the jobs of one owner the smallest. Idle time
earns no credit: an owner that comes back, or is new, begins with the time that an owner had on average meanwhile.
Room: a job that finds no room displaces the newest job of the owner that has the most, so that one owner may use all
room only while no other needs it.
"""

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass

from kvferry.core.errors import Overloaded

_RETRY_SECONDS = 1.0


@dataclass(eq=False, slots=True)
class Turn:
    """A waiting or running job."""

    owner: str
    size: int
    number: int
    """Order of arrival."""
    granted: "asyncio.Future[None]"
    begun: float = 0.0


class JobTurns:
    """Grants turns to one job at a time. Used on one event loop."""

    def __init__(self, max_jobs: int, subject: str) -> None:
        """
        Args:
            max_jobs: maximum number of waiting and running jobs.
            subject: what the jobs check, for errors, for example "prompt".
        """
        self._max_jobs, self._subject = max_jobs, subject
        self._running: Turn | None = None
        self._waiting: list[Turn] = []
        self._seconds: dict[str, float] = {}
        """Time that the jobs of each owner have taken; forgotten when no job waits."""
        self._share = 0.0
        """Time that an owner with waiting jobs has had on average since jobs began to wait: the virtual time of fair
        queueing (Demers, Keshav and Shenker, 1989)."""
        self._numbers = itertools.count()

    async def enter(self, owner: str, size: int) -> Turn:
        """Return when it is the job's turn; the caller must then pass the turn to `leave`.

        Args:
            owner: whose job it is.
            size: estimated cost of the job, for the order among jobs of one owner.

        Raises:
            Overloaded: there is no room for the job, or a job of another owner displaced it.
        """
        self._make_room(owner)
        loop = asyncio.get_running_loop()
        self._seconds[owner] = max(self._seconds.get(owner, 0.0), self._share)
        turn = Turn(owner, size, next(self._numbers), loop.create_future())
        self._waiting.append(turn)
        self._grant()
        try:
            await turn.granted
        except BaseException:
            if turn is self._running:
                self.leave(turn)
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise
        turn.begun = loop.time()
        return turn

    def leave(self, turn: Turn) -> None:
        """End a turn."""
        assert turn is self._running
        self._running = None
        if turn.begun:
            took = asyncio.get_running_loop().time() - turn.begun
            self._seconds[turn.owner] = self._seconds.get(turn.owner, 0.0) + took
            owners = {one.owner for one in self._waiting}
            self._share += took / len(owners | {turn.owner})
            # Others would begin with `_share` again.
            self._seconds = {one: t for one, t in self._seconds.items() if one in owners or t > self._share}
        if not self._waiting:
            self._seconds.clear()
            self._share = 0.0
        self._grant()

    def _make_room(self, owner: str) -> None:
        """Make room for a job of `owner`.

        Raises:
            Overloaded: no owner has more waiting jobs than `owner` would have.
        """
        if len(self._waiting) + (self._running is not None) < self._max_jobs:
            return
        jobs = Counter(turn.owner for turn in self._waiting)
        largest, most = max(jobs.items(), key=lambda item: item[1], default=(owner, 0))
        if most <= jobs[owner] + 1:
            raise self._overloaded()
        displaced = max((turn for turn in self._waiting if turn.owner == largest), key=lambda turn: turn.number)
        self._waiting.remove(displaced)
        if not displaced.granted.done():  # its caller may have been cancelled just now
            displaced.granted.set_exception(self._overloaded())

    def _overloaded(self) -> Overloaded:
        return Overloaded(
            f"too many requests are already waiting for their {self._subject} to be checked; retry later",
            retry_after_seconds=_RETRY_SECONDS,
        )

    def _grant(self) -> None:
        arrived: dict[str, int] = {}
        for one in reversed(self._waiting):
            arrived[one.owner] = one.number  # of the owner's first job, which decides between equal owners
        while self._running is None and self._waiting:
            first = min(
                self._waiting,
                key=lambda one: (self._seconds.get(one.owner, 0.0), arrived[one.owner], one.size, one.number),
            )
            self._waiting.remove(first)
            if not first.granted.done():  # its caller may have been cancelled just now
                self._running = first
                first.granted.set_result(None)
