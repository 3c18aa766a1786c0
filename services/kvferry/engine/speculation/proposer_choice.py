"""Choice among the proposers of a request: the one whose draft gives the most expected tokens per second. Pure.

    rate(offer)  =  max over n of  (sequences + p1 + p1 p2 + .. + p1..pn)  /  (seconds(rows + n) + drafting)

The choice is a bandit whose arms differ in what they reveal. Drafts from the text are proposed in any case, so they are
compared with the sampled tokens whether or not they are verified, and their probabilities are current. A draft model
or head is known from its own drafts only. The best estimate is therefore used, except for *probes*: after a pause
without a draft of a proposer that has a price, that proposer drafts once. A pause doubles with each probe whose first
token was wrong and halves with each that was right, within limits (an epsilon-greedy rule whose epsilon decays; Sutton
and Barto, Reinforcement Learning, 2018, section 2.3, made deterministic). So at most one draft in `FIRST_PAUSE` + 1 is
a probe, and a proposer that has become better is found after at most `MAX_PAUSE` drafts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

FIRST_PAUSE, MAX_PAUSE = 16, 64
"""Minimum and maximum number of drafts of other proposers between two probes of one proposer."""
HYSTERESIS = 1.05
"""Factor by which the rate of another proposer must exceed that of the current one: a draft model or head that has not
drafted for a while must first compute the tokens since then."""


class Offer(NamedTuple):
    """Expected draft of one proposer."""

    probabilities: Sequence[float]
    """For each draft token, the estimated probability that it is accepted if those before it are."""
    drafting: float = 0.0
    """Seconds that proposing takes, as the share of this sequence; 0 for drafts that are proposed in any case."""


def rate(offer: Offer, sequences: int, rows: int, seconds: Callable[[int], float]) -> float:
    """Return the expected tokens per second of a step with the best length of this draft.

    Args:
        offer: the draft.
        sequences: number of sequences of the step.
        rows: rows of the step without drafts.
        seconds: estimated seconds of a step by its number of rows.
    """
    expected, gain = float(sequences), 1.0
    best = expected / (seconds(rows) + offer.drafting)
    for count, probability in enumerate(offer.probabilities, 1):
        gain *= probability
        expected += gain
        best = max(best, expected / (seconds(rows + count) + offer.drafting))
    return best


class ProposerChoice:
    """The choices of one request. They depend only on its earlier choices and on the estimates that are passed."""

    __slots__ = ("_current", "_idle", "_pauses")

    def __init__(self) -> None:
        self._current: int | None = None
        self._idle: dict[int, int] = {}
        """Number of choices since the last draft, by proposer with a price."""
        self._pauses: dict[int, int] = {}

    def choose(self, offers: Mapping[int, Offer], sequences: int, rows: int, seconds: Callable[[int], float]) -> int:
        """Return the number of the proposer that drafts now.

        Args:
            offers: the expected drafts by number of their proposer, at least one.
            sequences: number of sequences of the step.
            rows: rows of the step without drafts.
            seconds: estimated seconds of a step by its number of rows.
        """
        rates = {number: rate(offer, sequences, rows, seconds) for number, offer in offers.items()}
        best = max(sorted(rates), key=lambda number: rates[number])
        current = self._current
        if current in rates and rates[best] <= HYSTERESIS * rates[current]:
            best = current
        self._current = best
        due = [number for number in sorted(offers) if number != best and self._is_due(number, offers[number])]
        chosen = due[0] if due else best
        self._idle[chosen] = 0
        return chosen

    def compared(self, number: int, *, is_right: bool) -> None:
        """Record whether the first token of a proposer's draft was right."""
        if number == self._current:
            self._pauses.pop(number, None)  # its next pause, if it is replaced, begins short
            return
        pause = self._pauses.get(number, FIRST_PAUSE)
        self._pauses[number] = max(FIRST_PAUSE, pause // 2) if is_right else min(2 * pause, MAX_PAUSE)

    def _is_due(self, number: int, offer: Offer) -> bool:
        """Count a choice of another proposer; return whether this one must be probed."""
        if not offer.drafting:
            return False
        idle = self._idle.get(number, 0)
        if idle >= self._pauses.get(number, FIRST_PAUSE):
            return True  # stays due until it is chosen
        self._idle[number] = idle + 1
        return False
