"""Finds the first stop string in a streamed text; holds back only text that may be the start of a stop string.

The first match is the match that ends first; of several matches that end at the same character, the longest. The result
therefore depends only on the text and the stop strings, not on how the text was split.
"""

from collections.abc import Sequence


class StopMatcher:
    """Matches the stop strings of a sequence."""

    __slots__ = ("_beginnings", "_held", "_ignored", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        """
        Args:
            stops: the stop strings, none of them empty.
        """
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._beginnings = {stop[:n] for stop in self._stops for n in range(1, len(stop))}
        self._held = ""
        self._ignored = 0
        """Number of leading characters of the held text in which no match may end."""
        self.matched: str | None = None
        """The stop string that was found; `None` if none has been found yet."""

    def feed(self, text: str, *, may_match: bool = True) -> str:
        """Add text and return the part that cannot belong to a stop string; empty after a match. Stop strings that end
        in text for which `may_match` is false are ignored.

        Args:
            text: text that follows the earlier text.
            may_match: whether stop strings that end in this text count.
        """
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        if not may_match:
            self._ignored = len(self._held)
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            clear, self._held = self._held[:start], ""
            return clear
        keep = self._could_begin()
        clear, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._ignored = max(0, self._ignored - len(clear))
        return clear

    def finish(self) -> str:
        """End the text and return the held-back part, which is not a stop string."""
        rest, self._held = self._held, ""
        return rest

    def _find(self, stop: str) -> int:
        """Return the start of the first match that may end the text; -1 if there is none."""
        return self._held.find(stop, max(0, self._ignored - len(stop) + 1))

    def _could_begin(self) -> int:
        """Return the length of the longest suffix of the text that is a prefix of a stop string."""
        held = self._held
        for length in range(min(self._longest - 1, len(held)), 0, -1):
            if held[-length:] in self._beginnings:
                return length
        return 0
