"""Finds the first of several markers in text received in pieces; holds back text that may belong to a marker.

Whitespace before a marker is held back too, since it is part of the format and not content.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MarkerMatch:
    """The result of a search."""

    clear: str
    """Text before the marker, or text that belongs to no marker."""
    marker: str | None = None
    """The marker that was found; `None` if none was found yet."""
    space: str = ""
    """Whitespace between `clear` and the marker."""
    rest: str = ""
    """Text after the marker."""


class MarkerSearch:
    """Searches one text for markers."""

    __slots__ = ("_at_start", "_beginnings", "_held", "_longest", "_markers", "is_blank")

    def __init__(self, markers: Sequence[str], *, at_start: Sequence[str] = ()) -> None:
        """
        Args:
            markers: markers anywhere in the text.
            at_start: markers of one character that count only as the first character of the text, after whitespace.
        """
        self._markers = tuple(markers)
        self._at_start = tuple(at_start)
        self._beginnings = {marker[:n] for marker in markers for n in range(1, len(marker))}
        self._longest = max(map(len, markers), default=0)
        self._held = ""
        self.is_blank = True
        """Whether only whitespace preceded the text that is held back."""

    @property
    def holds_text(self) -> bool:
        """Whether more than whitespace is held back."""
        return bool(self._held.strip())

    def feed(self, text: str) -> MarkerMatch:
        """Add text. After a marker was found, the caller processes `rest`."""
        held = self._held + text
        self._held = ""
        found = [(at, marker) for marker in self._markers if (at := held.find(marker)) >= 0]
        if self.is_blank:
            first = len(held) - len(held.lstrip())
            found += [(first, marker) for marker in self._at_start if held.startswith(marker, first)]
        if found:
            at, marker = min(found, key=lambda pair: pair[0])
            before = held[:at]
            clear = before.rstrip()
            self.is_blank = self.is_blank and not clear
            return MarkerMatch(clear, marker, before[len(clear) :], held[at + len(marker) :])
        keep = self._could_begin(held)
        clear = held[: len(held) - keep].rstrip()
        self._held = held[len(clear) :]
        self.is_blank = self.is_blank and not clear
        return MarkerMatch(clear)

    def finish(self) -> str:
        """End the text and return what was held back."""
        rest, self._held = self._held, ""
        return rest

    def _could_begin(self, text: str) -> int:
        """Return the length of the longest end of `text` that is the beginning of a marker."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0
