"""Reads lines from a terminal with the editing keys of `readline`, where Python has it."""

from contextlib import suppress
from types import ModuleType

from kvferry.cli.chatting.chat_lines import continues, joined
from kvferry.cli.chatting.typed_history import MAX_LINES, TypedHistory

_PROMPT, _MORE = "> ", ". "


class LineEditor:
    """Reads prompts, and keeps their lines for later chats."""

    def __init__(self, history: TypedHistory) -> None:
        """
        Args:
            history: lines of earlier chats, for the arrow keys.
        """
        self._history = history
        self._typed: list[str] = []
        self._readline: ModuleType | None = None
        with suppress(ImportError):
            import readline

            self._readline = readline
            readline.set_auto_history(False)
            readline.set_history_length(MAX_LINES)
            for line in history.lines():
                readline.add_history(line)

    def read(self) -> str:
        """Return the next text, whose lines but the last one ended with a backslash.

        Raises:
            EOFError: the terminal ended, or the user pressed Ctrl-D.
            KeyboardInterrupt: the user pressed Ctrl-C.
        """
        lines = [self._line(_PROMPT)]
        while continues(lines[-1]):
            lines.append(self._line(_MORE))
        return joined(lines)

    def close(self) -> None:
        """Keep the typed lines."""
        self._history.add(self._typed)
        self._typed = []

    def _line(self, prompt: str) -> str:
        line = input(prompt)
        if line.strip() and self._typed[-1:] != [line]:
            self._typed.append(line)
            if self._readline is not None:
                self._readline.add_history(line)
        return line
