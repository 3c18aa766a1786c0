"""Text of a server as text that a terminal only shows: without control characters.

A model can be told to write escape sequences, which set the title of a window, move the cursor, or make a terminal send
text as if it was typed. Each starts with a control character, and without it the rest is plain text.
"""

import re

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""C0 and C1 controls except newline and tab, and the marks that change the direction in which later text is shown."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_LINE_CHARS = 500


def shown(text: str) -> str:
    """Return text without control characters except newlines and tabs; it may be a part of a longer text."""
    return _SURROGATE.sub("\ufffd", _CONTROL.sub("", text))


def shown_line(text: str) -> str:
    """Return text as one line of at most 500 characters, without control characters."""
    line = " ".join(shown(text).split())
    return line if len(line) <= _MAX_LINE_CHARS else line[: _MAX_LINE_CHARS - 1] + "…"
