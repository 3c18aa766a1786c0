"""Proposers of the text for `ArithmeticRunner`, and a clock for their prices."""

from collections.abc import Callable

from harness.fakes.engines import next_token
from kvferry.core.clock import SystemClock
from kvferry.engine.schedule.speculation.matches import Tokens
from kvferry.engine.schedule.speculation.proposers import NO_DRAFT, Draft


class Oracle:
    """Proposes the right continuation; `wrong` decides which tokens are replaced by wrong ones."""

    def __init__(self, wrong: Callable[[], bool]) -> None:
        self._wrong = wrong

    def propose(self, tokens: Tokens, limit: int) -> Draft:
        known = tokens.tolist()
        draft: list[int] = []
        for _ in range(limit):
            token = next_token([*known, *draft])
            draft.append((token + 1) % 96 if self._wrong() else token)
        return Draft(tuple(draft), 9)


class TickingClock(SystemClock):
    """A clock that advances by the same time at each reading, so that steps of any number of rows take equally long."""

    def __init__(self, tick: float = 0.001) -> None:
        self._now, self._tick = 0.0, tick

    def monotonic(self) -> float:
        self._now += self._tick
        return self._now


class Silent:
    """A proposer without proposals."""

    def propose(self, tokens: Tokens, limit: int) -> Draft:
        return NO_DRAFT
