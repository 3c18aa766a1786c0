"""Turns of background sequences: those of the lowest priority, such as the lines of batches, take part in steps without
other sequences, and in every 32nd step beside them.

Every row of a step adds to its time, so that rows that nobody waits for would slow down the streams of those who wait.
A background sequence therefore keeps its pages and pauses while others are computed; the tokens that it gets beside
them show its owner that it is alive.
"""

from collections.abc import Sequence as OrderedView

from kvferry.core.sampling import MAX_PRIORITY
from kvferry.engine.schedule.step.sequence import Sequence

TURN_STEPS = 32
"""Number of steps beside other sequences of which background sequences take part in one."""


def is_background(sequence: Sequence) -> bool:
    """Return whether a sequence has the lowest priority."""
    return sequence.request.priority >= MAX_PRIORITY


class BackgroundTurns:
    """Decides in which steps of one scheduler background sequences take part."""

    def __init__(self, *, pauses: bool) -> None:
        """
        Args:
            pauses: whether background sequences pause; `False` if the policy gives their priority a share.
        """
        self._pauses = pauses
        self._num_steps = 0
        """Number of steps since the last one in which background sequences took part."""
        self._are_known = False
        """Whether there are background sequences that could take part in the step."""
        self._is_turn = False
        """Whether they take part in the step beside others."""
        self.is_paused = False
        """Whether background sequences take no part in the step that is being planned, and none is admitted."""
        self.num_paused = 0
        """Number of running sequences that the last planned step left out."""

    def begin(self, running: OrderedView[Sequence], first_waiting: Sequence | None) -> OrderedView[Sequence]:
        """Begin to plan a step; return the running sequences that take part.

        Args:
            running: the running sequences by order; background sequences are last.
            first_waiting: the sequence to admit next; `None` if none waits.
        """
        ends = [*running[:1], *running[-1:], *(() if first_waiting is None else (first_waiting,))]
        self._are_known = self._pauses and any(map(is_background, ends))
        self.is_paused = self._pauses and not all(map(is_background, ends))
        self.num_paused, self._is_turn = 0, False
        if not self._are_known or not self.is_paused:
            self._num_steps = 0
            return running
        if self._num_steps >= TURN_STEPS - 1:
            self._num_steps, self.is_paused, self._is_turn = 0, False, True
            return running
        self._num_steps += 1
        active = [sequence for sequence in running if not is_background(sequence)]
        self.num_paused = len(running) - len(active)
        return active

    @property
    def may_resume(self) -> bool:
        """Whether background sequences could take part in the step after all."""
        return self.is_paused and self._are_known

    def resume(self) -> None:
        """Let background sequences take part in the step after all, since no other sequence can."""
        self.is_paused, self.num_paused = False, 0

    @property
    def is_next_different(self) -> bool:
        """Whether the next step has other sequences than the last one because a turn begins or ends."""
        return self._is_turn or self._num_steps >= TURN_STEPS - 1

    def ahead(self) -> None:
        """Count a step with the sequences of the last one."""
        self._num_steps += self.may_resume
