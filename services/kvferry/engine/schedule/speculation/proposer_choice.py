"""Choice among the proposers of a request: the proposer whose draft yields the most expected tokens per second. Pure.

    rate(draft) = max over n of (sequences + p1 + p1 p2 + .. + p1..pn) / (seconds(rows + n) + drafting)

    sequences, rows   sequences of the step, and its rows without drafts
    n, p1..pn         number of draft tokens, and the probabilities that they are accepted
    seconds(rows)     estimated duration of a step with this number of rows
    drafting          measured time of the proposer for the draft; 0 for the proposers `ngram` and `suffix`

The choice is a bandit whose arms differ in what they reveal. Drafts of `ngram` and `suffix` are always proposed, so
they are compared with the sampled tokens whether or not they are verified, and their probabilities are current. A draft
model or head can be judged only by drafts that it has made. The best estimate is therefore used, except for *probes*:
a proposer with a drafting time above 0 that has not drafted for a number of drafts, its pause, drafts once. A pause
doubles with each probe whose first token was wrong and halves with each probe whose first token was right, within
limits (an epsilon-greedy rule whose epsilon decays; Sutton and Barto, Reinforcement Learning, 2018, section 2.3, made
deterministic). With one draft model or head, at most one draft in `FIRST_PAUSE` + 1 is a probe, and a proposer that
has become better is detected after at most `MAX_PAUSE` drafts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

FIRST_PAUSE, MAX_PAUSE = 16, 64
"""Minimum and maximum number of drafts of other proposers between two probes of one proposer."""
HYSTERESIS = 1.05
"""Factor by which another proposer's rate must exceed the current one's: a draft model or head that has not drafted for
a while must first compute the tokens generated since then."""


class ExpectedDraft(NamedTuple):
    """Expected draft of one proposer."""

    probabilities: Sequence[float]
    """For each draft token, the estimated probability that it is accepted, given that the earlier ones are."""
    drafting: float = 0.0
    """This sequence's share of the time that proposing takes, in seconds; 0 for drafts of `ngram` and `suffix`."""


def rate(draft: ExpectedDraft, sequences: int, rows: int, seconds: Callable[[int], float]) -> float:
    """Return the expected tokens per second of a step with the best length of this draft.

    Args:
        draft: the expected draft.
        sequences: number of sequences of the step.
        rows: number of rows of the step without drafts.
        seconds: estimated duration of a step in seconds, by its number of rows.
    """
    expected, gain = float(sequences), 1.0
    best = expected / (seconds(rows) + draft.drafting)
    for count, probability in enumerate(draft.probabilities, 1):
        gain *= probability
        expected += gain
        best = max(best, expected / (seconds(rows + count) + draft.drafting))
    return best


class ProposerChoice:
    """The choices of one request. They depend only on its earlier choices and on the estimates that are passed in."""

    __slots__ = ("_current", "_idle", "_pauses")

    def __init__(self) -> None:
        self._current: int | None = None
        self._idle: dict[int, int] = {}
        """Number of choices since the last draft, for each proposer with a drafting time above 0."""
        self._pauses: dict[int, int] = {}

    def choose(
        self, drafts: Mapping[int, ExpectedDraft], sequences: int, rows: int, seconds: Callable[[int], float]
    ) -> int:
        """Return the number of the proposer that drafts now.

        Args:
            drafts: the expected drafts by number of their proposer, at least one.
            sequences: number of sequences of the step.
            rows: rows of the step without drafts.
            seconds: estimated duration of a step in seconds, by its number of rows.
        """
        rates = {number: rate(draft, sequences, rows, seconds) for number, draft in drafts.items()}
        best = max(sorted(rates), key=lambda number: rates[number])
        current = self._current
        if current in rates and rates[best] <= HYSTERESIS * rates[current]:
            best = current
        self._current = best
        due = [number for number in sorted(drafts) if number != best and self._is_due(number, drafts[number])]
        chosen = due[0] if due else best
        self._idle[chosen] = 0
        return chosen

    def compared(self, number: int, *, is_right: bool) -> None:
        """Record the outcome of a proposer's draft by its first token.

        Args:
            number: index of the proposer.
            is_right: whether the first token of its draft equals the sampled token.
        """
        if number == self._current:
            self._pauses.pop(number, None)  # if it is replaced, its next pause begins short
            return
        pause = self._pauses.get(number, FIRST_PAUSE)
        self._pauses[number] = max(FIRST_PAUSE, pause // 2) if is_right else min(2 * pause, MAX_PAUSE)

    def _is_due(self, number: int, draft: ExpectedDraft) -> bool:
        """Count a choice of another proposer; return whether this one must be probed."""
        if not draft.drafting:
            return False
        idle = self._idle.get(number, 0)
        if idle >= self._pauses.get(number, FIRST_PAUSE):
            return True  # stays due until it is chosen
        self._idle[number] = idle + 1
        return False
