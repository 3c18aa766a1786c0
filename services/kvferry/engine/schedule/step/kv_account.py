"""Account of one prompt: where the KV of each of its tokens came from, and the causes of the computed ones.

    prompt      [ cached | loaded | computed ............. ]      each position once, by its first source
    computed              [ evicted | first_seen | partial_block ]
                          [ preempted ]                            again, after its pages were freed

The positions are counted in order: those below `num_counted` have a source. Once no pages are left, they are cached,
loaded or computed a second time; only computing them again is counted.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kvferry.core.causes import ComputeCause, ComputedTokens
from kvferry.core.errors import InvariantBroken

_log = logging.getLogger(__name__)

Spans = Sequence[tuple[int, ComputeCause]]
"""Causes of a range of positions, in order: the position after each part, and its cause."""


@dataclass(slots=True, eq=False)
class KvAccount:
    """Sources of the tokens of one sequence's prompt on this worker. Changed only through its methods."""

    is_strict: ClassVar[bool] = False
    """Whether a position without a cause is an error, as in tests; it is logged otherwise, since no request should fail
    for a statistic."""
    num_prompt: int = 0
    """Number of the prompt's tokens, whose computation has causes."""
    num_given: int = 0
    """Number of tokens with which the request arrived: the prompt, and tokens that other workers generated."""
    num_counted: int = 0
    """Number of leading tokens that have a source."""
    num_cached: int = 0
    """Number of given tokens that were found in the prefix cache."""
    num_loaded: int = 0
    """Number of given tokens that were loaded from a peer or a tier."""
    failed: range = range(0)
    """Positions whose load failed or could not start."""
    dearer: range = range(0)
    """Positions that could be loaded, and are computed because that was estimated to be faster."""
    evicted_seconds: float = 0.0
    """Seconds between the eviction of the first missing block and the start of the computation."""
    _spans: list[tuple[int, ComputeCause]] = field(default_factory=list)
    """Causes of the positions to compute, in reverse order."""
    unreported: dict[ComputeCause, int] = field(default_factory=dict)
    """The prompt's tokens that were computed since the last call of `take_computed`, by cause."""

    def cached_to(self, num_tokens: int) -> int:
        """Count the cached tokens of a sequence that starts to run, and return how many of the prompt's were added.

        Args:
            num_tokens: number of leading tokens in the prefix cache.
        """
        before = self.num_counted
        self.num_counted = max(before, min(num_tokens, self.num_given))
        self.num_cached += self.num_counted - before
        return self._of_prompt(before)

    def loaded_to(self, num_tokens: int) -> int:
        """Count loaded tokens, and return how many of the prompt's were added.

        Args:
            num_tokens: number of leading tokens that are cached or loaded.
        """
        before = self.num_counted
        self.num_counted = max(before, min(num_tokens, self.num_given))
        self.num_loaded += self.num_counted - before
        return self._of_prompt(before)

    def load_failed(self, positions: range) -> None:
        """Record a load that failed or could not start; the last one counts."""
        self.failed = positions

    def load_dearer(self, positions: range) -> None:
        """Record that positions are computed although they could be loaded; the last decision counts."""
        self.dearer = positions

    def evicted(self, seconds: float) -> None:
        """Record that a block is missing because it was evicted this long ago; the first one counts."""
        self.evicted_seconds = self.evicted_seconds or seconds

    def plan(self, spans: Spans) -> None:
        """Set the causes of the positions from `num_counted` to the end of the prompt."""
        self._spans = list(spans[::-1])

    def computed(self, start: int, count: int) -> list[tuple[ComputeCause, int]]:
        """Count computed tokens, and return the prompt's by cause.

        Args:
            start: first position.
            count: number of positions.

        Raises:
            InvariantBroken: a position has no cause, and `is_strict` is set.
        """
        parts: list[tuple[ComputeCause, int]] = []
        end = min(start + count, self.num_prompt)
        again = min(end, self.num_counted) - start
        if again > 0:
            parts.append((ComputeCause.PREEMPTED, again))
            start += again
        while start < end:
            while self._spans and self._spans[-1][0] <= start:
                self._spans.pop()
            if not self._spans:
                self._no_cause(start)
                self._spans.append((self.num_prompt, ComputeCause.FIRST_SEEN))
            stop, cause = self._spans[-1]
            parts.append((cause, min(stop, end) - start))
            start = min(stop, end)
        self.num_counted = max(self.num_counted, min(start, self.num_given))
        for cause, num_tokens in parts:
            self.unreported[cause] = self.unreported.get(cause, 0) + num_tokens
        return parts

    def take_computed(self) -> tuple[ComputedTokens, ...]:
        """Return the prompt's tokens that were computed since the last call, by cause."""
        found, self.unreported = self.unreported, {}
        seconds = self.evicted_seconds
        return tuple(
            ComputedTokens(cause, num_tokens, seconds if cause is ComputeCause.EVICTED else 0.0)
            for cause, num_tokens in found.items()
        )

    def _no_cause(self, position: int) -> None:
        text = f"position {position} of a prompt of {self.num_prompt} tokens has no cause of its computation"
        if self.is_strict:
            raise InvariantBroken(text)
        _log.error("%s; it is counted as %s", text, ComputeCause.FIRST_SEEN)

    def _of_prompt(self, before: int) -> int:
        return min(self.num_counted, self.num_prompt) - min(before, self.num_prompt)
