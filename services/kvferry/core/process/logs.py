"""Structured logs on standard error: one JSON object per line, with the request id if the record has one.

Errors are logged once, by the outermost handler; inner layers raise.
"""

import json
import logging
import re
import sys
from datetime import UTC, datetime

_NOT_PRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
LOG_NAME_VARIABLE = "KVFERRY_LOG_NAME"
"""Environment variable with which a supervisor names a process; the name is in each line of the process's log."""
_EXTRA_FIELDS = ("request_id", "worker", "ticket", "peer")


class JsonFormatter(logging.Formatter):
    """Formats a log record as one line of JSON."""

    def __init__(self, process: str = "") -> None:
        """
        Args:
            process: name of this process among those of its supervisor; empty if it has none.
        """
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._process:
            entry["process"] = self._process
        for name in _EXTRA_FIELDS:
            if hasattr(record, name):
                entry[name] = getattr(record, name)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """Formats records as text; control characters of the message are escaped, so that input cannot forge a line."""

    def __init__(self, process: str = "") -> None:
        """
        Args:
            process: name of this process among those of its supervisor, before each line; empty if it has none.
        """
        before = f"{process}: ".replace("%", "%%") if process else ""
        super().__init__(f"{before}%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's name
        record.message = _NOT_PRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), record.message)
        return super().formatMessage(record)


def setup(level: str, *, as_json: bool, process: str = "") -> None:
    """Configure the root logger to write to standard error; replaces earlier handlers.

    Args:
        level: name of the lowest level to write, in either case.
        as_json: whether records are JSON objects; otherwise lines of text.
        process: name of this process among those of its supervisor; empty if it has none.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if as_json else TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("asyncio", "filelock", "grpc", "httpcore2", "httpx", "httpx2", "uvicorn.access", "uvicorn.error"):
        logging.getLogger(noisy).setLevel("WARNING")
