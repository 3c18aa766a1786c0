"""Calls of scripts at the pool's Redis server that block their thread, with time limits."""

import threading
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from kvferry.core.clock import Clock
from kvferry.gateway.state.state_client import (
    SOCKET_SECONDS,
    OnCall,
    StoreUnavailable,
    connection_options,
    failure_of,
)
from kvferry.gateway.state.state_url import StateServer

_RETRY_SECONDS = 1.0
"""Time after a call without an answer in which no other one is tried."""


class BlockingStateClient:
    """Connections to the Redis server, one for each thread that calls at a time. May be used on any thread."""

    def __init__(self, server: StateServer, clock: Clock, part: str, on_call: OnCall | None = None) -> None:
        """
        Args:
            server: the server; it is connected to with the first call.
            clock: time of failures.
            part: part of the gateway that calls, a label of metrics.
            on_call: called after each call on the thread of the call, for metrics.

        Raises:
            UsageError: the package that speaks Redis is not installed, or the CA cannot be read.
        """
        self.server = server
        self._clock, self._part, self._on_call = clock, part, on_call
        kind, options = connection_options(server, "redis")
        redis, errors = import_module("redis"), import_module("redis.exceptions")
        self._failures = (errors.RedisError, OSError)
        # A call that needs a further connection waits for one.
        pool = redis.BlockingConnectionPool(connection_class=kind, timeout=SOCKET_SECONDS, **options)
        self._client: Any = redis.Redis.from_pool(pool)
        self._lock = threading.Lock()
        self._failed_at: float | None = None
        self._why = ""

    def register(self, text: str) -> Any:
        """Return the client's own object of a script, for `run`."""
        return self._client.register_script(text)

    def run(self, script: Any, keys: Sequence[bytes], arguments: Sequence[bytes | int | float]) -> list[Any]:
        """Run a script, and return its reply. Blocks, for about 2 seconds without an answer.

        Args:
            script: what `register` returned.
            keys: keys that it uses, all with the prefix of the pool.
            arguments: its arguments.

        Raises:
            StoreUnavailable: Redis did not answer in time, with an error, or not a moment ago; unless it answered with
                an error, the script may have run or not, and may still run.
        """
        self._check()
        try:
            found: list[Any] = script(keys, arguments)
        except self._failures as error:
            unavailable, outcome = failure_of(error, self.server)
            with self._lock:
                self._failed_at = None if unavailable.has_answered else self._clock.monotonic()
                self._why = unavailable.message
            self._note(outcome)
            raise unavailable from error
        with self._lock:
            self._failed_at = None
        self._note("ok")
        return found

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
        self._client.connection_pool.disconnect()

    def _check(self) -> None:
        with self._lock:
            if self._failed_at is not None and self._clock.monotonic() - self._failed_at < _RETRY_SECONDS:
                raise StoreUnavailable(self._why)

    def _note(self, outcome: str) -> None:
        if self._on_call is not None:
            self._on_call(self._part, outcome)
