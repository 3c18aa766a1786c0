"""Draft lengths of a step: as many draft tokens as increase the expected output tokens per second.

A draft token can be accepted only if all earlier ones are, so the gain of a sequence's j-th draft token is the product
of the probabilities of its first j draft tokens (Leviathan et al., Fast Inference from Transformers via Speculative
Decoding, 2023, section 3.1). The draft tokens of all sequences are taken in descending order of gain, and the rate is
computed for each number of rows; the number with the best rate is chosen. Tokens of a tree are in descending order of
gain, so that the first ones are the best tree of their number:

    rate(m)  =  (sequences + gains of the first m draft tokens)  /  seconds of a step of (rows + m) rows
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Protocol

from kvferry.engine.schedule.speculation.row_prices import RowPrices

MAX_DRAFT_ROWS = 64
"""Maximum number of draft tokens in a step, over all sequences."""
MIN_ADVANTAGE = 1.08
"""Minimum factor by which drafts must be estimated to increase the rate, since prices and probabilities are only
estimates."""


def draft_lengths(gains: Sequence[Sequence[float]], rows: int, seconds: Callable[[int], float]) -> list[int]:
    """Choose the number of draft tokens of each sequence.

    Args:
        gains: for each decoding sequence, the acceptance probability of each of its draft tokens, descending; empty for
            a sequence without a draft.
        rows: number of rows of the step without drafts.
        seconds: estimated duration of a step in seconds, by its number of rows.
    """
    taken = [0] * len(gains)
    best = list(taken)
    expected = float(len(gains))
    best_rate = MIN_ADVANTAGE * expected / seconds(rows)
    heap = [(-own[0], index) for index, own in enumerate(gains) if own]
    heapq.heapify(heap)
    for count in range(1, MAX_DRAFT_ROWS + 1):
        if not heap:
            break
        gain, index = heapq.heappop(heap)
        expected -= gain
        taken[index] += 1
        if taken[index] < len(gains[index]):
            heapq.heappush(heap, (-gains[index][taken[index]], index))
        rate = expected / seconds(rows + count)
        if rate > best_rate:
            best, best_rate = list(taken), rate
    return best


class Lengths(Protocol):
    """Chooses how many tokens of each draft a step verifies."""

    def choose(self, gains: list[list[float]], rows: int, prices: RowPrices) -> list[int]:
        """Return the number of draft tokens of each sequence.

        Args:
            gains: for each sequence, the estimated probability that each draft token is accepted, descending.
            rows: rows of the step without drafts.
            prices: estimated duration of a step by its number of rows.
        """
        ...


class WholeDrafts:
    """Verifies all draft tokens, at any load."""

    def choose(self, gains: list[list[float]], rows: int, prices: RowPrices) -> list[int]:
        """See `Lengths.choose`."""
        left, lengths = MAX_DRAFT_ROWS, []
        for own in gains:
            lengths.append(min(len(own), left))
            left -= lengths[-1]
        return lengths


class PayingDrafts:
    """Verifies as many draft tokens as increase the expected tokens per second."""

    def choose(self, gains: list[list[float]], rows: int, prices: RowPrices) -> list[int]:
        """See `Lengths.choose`."""
        return draft_lengths(gains, rows, prices.seconds)
