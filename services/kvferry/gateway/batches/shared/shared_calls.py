"""Calls of the scripts of files and batches in Redis, with their failures as errors of the API."""

import logging
import threading
from collections.abc import Callable
from typing import Any

from kvferry.core.clock import Clock
from kvferry.core.errors import Unavailable
from kvferry.core.rare_lines import RareLines, more
from kvferry.gateway.batches.batch_errors import LeaseLost
from kvferry.gateway.batches.shared.shared_scripts import ScriptReply
from kvferry.gateway.state.blocking_client import BlockingStateClient
from kvferry.gateway.state.pool_seal import PoolSeal
from kvferry.gateway.state.state_client import StoreUnavailable

_log = logging.getLogger(__name__)
BYTES_SETTING = "state_file_bytes"
_RETRY_SECONDS = 1.0


class SharedCalls:
    """Calls scripts. May be used on any thread; calls block."""

    def __init__(
        self,
        client: BlockingStateClient,
        seal: PoolSeal,
        gateway: str,
        max_bytes: int,
        clock: Clock,
        *,
        on_failure: Callable[[str], None] = lambda _: None,
        wall_ms: Callable[[], int] | None = None,
    ) -> None:
        """
        Args:
            client: calls the server.
            seal: derives names and seals.
            gateway: a name that no other gateway has, and no earlier process of this one.
            max_bytes: bound of all files and batches.
            clock: clock of log lines.
            on_failure: called with the reason when files or batches could not be written or read, for metrics.
            wall_ms: time in the scripts, in ms; `None` for the server's.
        """
        self.seal, self.gateway, self.max_bytes = seal, gateway.encode(), max_bytes
        self.server = client.server.text
        self._client, self._on_failure, self._wall_ms = client, on_failure, wall_ms
        self._keys = (seal.prefix + b"f:",)
        self._scripts: dict[str, Any] = {}
        self._lines, self._lock = RareLines(clock), threading.Lock()

    @property
    def upload_bytes(self) -> int:
        """Bound of all files and batches for uploads, which leave an eighth to results."""
        return self.max_bytes - self.max_bytes // 8

    def run(
        self, text: str, *arguments: bytes | int | float, at_ms: int | None = None
    ) -> tuple[ScriptReply, list[Any]]:
        """Run a script.

        Args:
            text: the script.
            arguments: its arguments after the time.
            at_ms: time in the script; `None` for the current one.

        Returns:
            `DONE`, `MOVED` or `REFUSED`, and the rest of the reply.

        Raises:
            Unavailable: the server does not answer in time, or refuses; or the bound of bytes is reached.
            LeaseLost: the lease is another gateway's.
        """
        with self._lock:
            script = self._scripts.get(text) or self._scripts.setdefault(text, self._client.register(text))
        now: bytes | int = b"" if self._wall_ms is None else self._wall_ms()
        try:
            code, *rest = self._client.run(script, self._keys, [now if at_ms is None else at_ms, *arguments])
        except StoreUnavailable as error:
            self.note("unreachable", f"files and batches can be neither stored nor read: {error.message}")
            raise Unavailable(
                f"files and batches can be neither stored nor read: {error.message}; send the request again",
                reason="FILES_UNAVAILABLE",
                field="state",
                retry_after_seconds=_RETRY_SECONDS,
            ) from error
        reply = ScriptReply(code)
        if reply is ScriptReply.FENCED:
            self.note("fenced", "a write of a batch is refused: another gateway runs the batches")
            raise LeaseLost("another gateway runs the batches now")
        if reply is ScriptReply.FULL:
            self.note("full", f"files and batches have {rest[0]} bytes, the bound of --state-file-bytes")
            raise Unavailable(
                f"the files and batches of all tenants have {rest[0]} bytes, and at most {self.max_bytes} are stored "
                f"(setting {BYTES_SETTING}), an eighth of them for results; delete files",
                reason="FILES_FULL",
                field=BYTES_SETTING,
            )
        return reply, rest

    def note(self, reason: str, line: str) -> None:
        """Count a failure, and log the first of each minute."""
        self._on_failure(reason)
        with self._lock:
            left_out = self._lines.left_out(reason)
        if left_out is not None:
            _log.warning("%s%s", line, more(left_out))

    def foreign(self, what: str) -> None:
        """Count and log a value that the pool's key does not open."""
        self.note("foreign", f"{what} does not open with the pool's key, and is not found")
