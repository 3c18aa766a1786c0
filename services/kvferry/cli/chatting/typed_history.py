"""The lines that were typed in chats, kept in a file of the cache folder that only its user can read."""

import os
from contextlib import suppress
from pathlib import Path

MAX_LINES = 1000
_MAX_LINE_CHARS = 4096
_MAX_BYTES = 8 << 20


class TypedHistory:
    """A file with a bounded number of lines. It is a convenience: what cannot be read or written is left out."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def lines(self) -> list[str]:
        """Return the newest lines, oldest first."""
        try:
            if not self._path.is_file() or self._path.stat().st_size > _MAX_BYTES:
                return []
            return self._path.read_text("utf-8", "replace").rstrip("\n").split("\n")[-MAX_LINES:]
        except OSError:
            return []

    def add(self, typed: list[str]) -> None:
        """Append lines to those that the file has now, which other chats may have extended, and drop the oldest."""
        if not typed:
            return
        kept = [*self.lines(), *(line[:_MAX_LINE_CHARS] for line in typed)][-MAX_LINES:]
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
                    file.writelines(f"{line}\n" for line in kept)
                fresh.replace(self._path)
            finally:
                fresh.unlink(missing_ok=True)
