"""Structured logs: one JSON object a line on standard error, the request id on every line that has one.

Logging happens once, at the edge of a process; the layers below raise.
"""

import json
import logging
import sys
from datetime import UTC, datetime

_EXTRA_FIELDS = ("request_id", "worker", "ticket", "peer")


class JsonFormatter(logging.Formatter):
    """One record, one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in _EXTRA_FIELDS:
            if hasattr(record, name):
                entry[name] = getattr(record, name)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def setup(level: str, *, as_json: bool) -> None:
    """Send the process's logs to standard error, replacing any earlier set-up."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonFormatter() if as_json else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("asyncio", "grpc", "httpx", "uvicorn.access"):
        logging.getLogger(noisy).setLevel("WARNING")
