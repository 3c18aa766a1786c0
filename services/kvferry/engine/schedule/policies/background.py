"""Turns of background sequences: those of the lowest priority, such as the lines of batches, take part in steps without
other sequences, and in one of `background_steps` steps beside them.

Each row adds to the time of a step, so rows of batches would increase the inter-token latency of interactive streams.
A background sequence therefore keeps its pages and pauses while others are computed; the tokens that it gets beside
them bound its wait.

A request that arrives waits for the end of the step that runs. Steps of background sequences alone are therefore short
while other requests come: they begin with `FIRST_TOKENS` tokens, and have twice as many after each `GROWTH_STEPS` steps
in a row, and none of the first ones is launched before the one that runs has ended.
"""

from collections.abc import Sequence as OrderedView

from kvferry.core.sampling import MAX_PRIORITY
from kvferry.engine.schedule.step.sequence import Sequence

TURN_TOKENS = 8
"""Maximum number of tokens of background sequences in a step beside others."""
FIRST_TOKENS = 16
"""Maximum number of tokens in the first steps without other sequences."""
GROWTH_STEPS = 32
"""Number of steps without other sequences after which the maximum doubles."""


def is_background(sequence: Sequence) -> bool:
    """Return whether a sequence has the lowest priority."""
    return sequence.request.priority >= MAX_PRIORITY


class BackgroundTurns:
    """Decides in which steps of one scheduler background sequences take part, and with how many tokens."""

    def __init__(self, period: int) -> None:
        """
        Args:
            period: background sequences take part in one of this many steps beside others; 1 if they never pause.
        """
        self._period = period
        self._num_beside = self._num_alone = 0
        """Numbers of steps in a row beside paused background sequences, and of steps with background sequences only."""
        self._are_known = False
        """Whether there are background sequences that could take part in the step."""
        self._is_turn = False
        """Whether they take part in the step beside others."""
        self.is_paused = False
        """Whether background sequences take no part in the step that is being planned, and none is admitted."""
        self.num_paused = 0
        """Number of running sequences that the last planned step left out."""

    def begin(
        self, running: OrderedView[Sequence], *, num_waiting: int, num_waiting_background: int
    ) -> OrderedView[Sequence]:
        """Begin to plan a step; return the running sequences that take part.

        Args:
            running: the running sequences by order; background sequences are last.
            num_waiting: number of waiting sequences.
            num_waiting_background: number of background sequences among them.
        """
        self.num_paused, self._is_turn = 0, False
        if self._period == 1:
            return running
        self._are_known = num_waiting_background > 0 or (bool(running) and is_background(running[-1]))
        self.is_paused = num_waiting > num_waiting_background or (bool(running) and not is_background(running[0]))
        if not self.is_paused:
            self._num_beside, self._num_alone = 0, self._num_alone + self._are_known
            return running
        self._num_alone = 0
        if not self._are_known:
            self._num_beside = 0
            return running
        if self._num_beside >= self._period - 1:
            self._num_beside, self.is_paused, self._is_turn = 0, False, True
            return running
        self._num_beside += 1
        active = [sequence for sequence in running if not is_background(sequence)]
        self.num_paused = len(running) - len(active)
        return active

    @property
    def max_tokens(self) -> int | None:
        """Maximum number of tokens of background sequences in the step; `None` if they count like others."""
        if self._period == 1:
            return None
        return TURN_TOKENS if self._is_turn else FIRST_TOKENS << min(self._num_alone // GROWTH_STEPS, 20)

    @property
    def may_resume(self) -> bool:
        """Whether background sequences could take part in the step after all."""
        return self.is_paused and self._are_known

    def resume(self) -> None:
        """Let background sequences take part in the step after all, since no other sequence can."""
        self.is_paused, self.num_paused = False, 0

    @property
    def is_last_planned(self) -> bool:
        """Whether no step may be planned before the results of the last one are known: because a turn begins or ends,
        or because a step of background sequences alone would make a request wait that may come soon."""
        is_expected = 0 < self._num_alone < GROWTH_STEPS and not self.is_paused
        return is_expected or self._is_turn or self._num_beside >= self._period - 1 > 0

    def ahead(self) -> None:
        """Count a step with the sequences of the last one."""
        self._num_beside += self.may_resume
        self._num_alone += self._are_known and not self.is_paused
