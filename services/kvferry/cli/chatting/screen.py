"""Writes a chat to a terminal or a pipe: answers as they arrive, notes dim, errors apart."""

from typing import TextIO

from kvferry.cli.chatting.received_answer import PartKind
from kvferry.cli.chatting.safe_text import shown

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Screen:
    """Where a chat is shown."""

    def __init__(self, output: TextIO, errors: TextIO, *, is_terminal: bool, has_colours: bool) -> None:
        """
        Args:
            output: answers, and on a terminal all else but errors.
            errors: errors.
            is_terminal: whether `output` is a terminal, which also gets reasoning.
            has_colours: whether reasoning and notes are dim.
        """
        self._output, self._errors = output, errors
        self.is_terminal = is_terminal
        self._has_colours = has_colours
        self._is_dim = False
        self._is_line_open = False
        self._last_kind: PartKind | None = None

    def part(self, kind: PartKind, text: str) -> None:
        """Write a part of an answer; reasoning only on a terminal."""
        if kind is PartKind.REASONING and not self.is_terminal:
            return
        if self._last_kind is PartKind.REASONING and kind is not PartKind.REASONING:
            self.end_line()
            text = text.lstrip("\n")
        if not text:
            return
        self._last_kind = kind
        self._dim(kind is PartKind.REASONING)
        self._write(shown(text))
        self._output.flush()

    def end_answer(self) -> None:
        """End the line of an answer, whole or not, and its colour."""
        self._dim(False)
        self.end_line()
        self._last_kind = None
        self._output.flush()

    def note(self, text: str) -> None:
        """Write lines of this program; dim if there are colours."""
        self.end_line()
        self._dim(True)
        self._write(shown(text))
        self._dim(False)
        self.end_line()
        self._output.flush()

    def error(self, text: str) -> None:
        """Write an error."""
        self.end_answer()
        self._errors.write(f"kvferry: {shown(text)}\n")
        self._errors.flush()

    def end_line(self) -> None:
        """End the current line if it has text."""
        if self._is_line_open:
            self._dim(False)
            self._write("\n")

    def _dim(self, wanted: bool) -> None:
        if self._has_colours and wanted is not self._is_dim:
            self._output.write(_DIM if wanted else _PLAIN)
            self._is_dim = wanted

    def _write(self, text: str) -> None:
        if text:
            self._output.write(text)
            self._is_line_open = not text.endswith("\n")
