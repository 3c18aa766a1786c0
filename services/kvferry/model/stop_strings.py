"""Finds the first stop string in a text that comes in pieces, and holds back only what could still begin one.

"First" is the occurrence that is complete first; of several that end at the same character, the longest. So the
result depends on the text and the stop strings alone, not on how the text was cut into pieces.
"""

from collections.abc import Sequence


class StopMatcher:
    """One sequence's watch for stop strings."""

    __slots__ = ("_beginnings", "_held", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        """
        Args:
            stops: none of them empty.
        """
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._beginnings = {stop[:n] for stop in self._stops for n in range(1, len(stop))}
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; `None` so far."""

    def feed(self, text: str) -> str:
        """The text that is now known to be before any stop string. Nothing more after a match."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            clear, self._held = self._held[:start], ""
            return clear
        keep = self._could_begin()
        clear, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return clear

    def finish(self) -> str:
        """What was held back: the text is over, so it began no stop string."""
        rest, self._held = self._held, ""
        return rest

    def _could_begin(self) -> int:
        """Characters at the end that are the beginning of a stop string; the most there are."""
        held = self._held
        for length in range(min(self._longest - 1, len(held)), 0, -1):
            if held[-length:] in self._beginnings:
                return length
        return 0
