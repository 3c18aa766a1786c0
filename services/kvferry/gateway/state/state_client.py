"""Calls of scripts at the Redis server that the gateways of a pool share: one client per gateway, with time limits."""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from kvferry.core.errors import KvferryError, UsageError
from kvferry.gateway.state.state_url import StateServer

SOCKET_SECONDS = 2.0
_CONNECT_SECONDS = 1.0
_MAX_CONNECTIONS = 16
_OUTCOMES = {
    "OOM": "full", "OutOfMemoryError": "full", "READONLY": "read_only", "ReadOnlyError": "read_only",
    "TimeoutError": "slow",
}  # fmt: skip
_LOST = ("ConnectionError", "ConnectionRefusedError", "LOADING", "MASTERDOWN", "CLUSTERDOWN")
"""Errors of a server that is not there, or not yet."""
OnCall = Callable[[str, str], None]
"""Function of the part that called, and the outcome."""


class StoreUnavailable(KvferryError):
    """Redis does not answer in time, or answers with an error."""

    reason = "STATE_UNAVAILABLE"
    has_answered = False
    """Whether the server answered, with an error: a further call costs no time limit, and may succeed."""


class StateScript:
    """A script of one part of the gateway."""

    def __init__(self, client: "StateClient", part: str, text: str) -> None:
        self._client, self._part = client, part
        self._script: Any = client.register(text)

    async def run(self, keys: Sequence[bytes], arguments: Sequence[bytes | int | float], seconds: float) -> list[Any]:
        """Run the script, and return its reply.

        Args:
            keys: keys that it uses, all with the prefix of the pool.
            arguments: its arguments.
            seconds: time limit.

        Raises:
            StoreUnavailable: Redis did not answer in time, or with an error; the script may have run or not.
        """
        return await self._client.run(self._part, self._script, keys, arguments, seconds)


class StateClient:
    """Connections to the Redis server of a pool's gateways. Used on the event loop's thread only."""

    def __init__(self, server: StateServer, on_call: OnCall | None = None) -> None:
        """
        Args:
            server: the server; it is connected to with the first command.
            on_call: called after each call, for metrics.

        Raises:
            UsageError: the package that speaks Redis is not installed, or the CA cannot be read.
        """
        self.server = server
        self._on_call = on_call
        redis = _redis()
        self._failures = (import_module("redis.exceptions").RedisError, OSError, TimeoutError)
        kind, options = connection_options(server, "redis.asyncio")
        # A call that needs a further connection waits for one, within its time limit.
        pool = redis.BlockingConnectionPool(connection_class=kind, timeout=None, **options)
        self._client: Any = redis.Redis.from_pool(pool)

    def script(self, part: str, text: str) -> StateScript:
        """Return a script.

        Args:
            part: part of the gateway that calls it, a label of metrics.
            text: the script, in Lua.
        """
        return StateScript(self, part, text)

    def register(self, text: str) -> Any:
        """Return the client's own object of a script."""
        return self._client.register_script(text)

    async def run(
        self, part: str, script: Any, keys: Sequence[bytes], arguments: Sequence[bytes | int | float], seconds: float
    ) -> list[Any]:
        """See `StateScript.run`."""
        try:
            async with asyncio.timeout(seconds):
                found: list[Any] = await script(keys, arguments)
        except self._failures as error:
            unavailable, outcome = failure_of(error, self.server)
            self._note(part, outcome)
            raise unavailable from error
        self._note(part, "ok")
        return found

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def _note(self, part: str, outcome: str) -> None:
        if self._on_call is not None:
            self._on_call(part, outcome)


def connection_options(server: StateServer, package: str) -> tuple[Any, dict[str, Any]]:
    """Return the class of a connection, and the options of a pool of connections.

    Args:
        server: the server.
        package: `redis` or `redis.asyncio`.
    """
    classes = import_module(f"{package}.connection")
    options: dict[str, Any] = {
        "db": server.db,
        "username": server.username or None,
        "password": server.password or None,
        "socket_timeout": SOCKET_SECONDS,
        "socket_connect_timeout": _CONNECT_SECONDS,
        "retry": import_module(f"{package}.retry").Retry(import_module("redis.backoff").NoBackoff(), 0),
        "max_connections": _MAX_CONNECTIONS,
    }
    if server.socket:
        return classes.UnixDomainSocketConnection, {**options, "path": server.socket}
    options |= {"host": server.host, "port": server.port}
    if not server.is_tls:
        return classes.Connection, options
    return classes.SSLConnection, {
        **options, "ssl_ca_certs": server.cacert or None, "ssl_cert_reqs": ssl.CERT_REQUIRED
    }  # fmt: skip


def failure_of(error: Exception, server: StateServer) -> tuple[StoreUnavailable, str]:
    """Return the error of a failed call, and its outcome for metrics."""
    # Not the error's text, which may contain keys and passwords.
    code = str(error).partition(" ")[0]
    shown = code if code.isascii() and code.isupper() and code.isalpha() else type(error).__name__
    unavailable = StoreUnavailable(f"Redis at {server.text} failed: {shown}")
    answers: type[Exception] = import_module("redis.exceptions").ResponseError
    unavailable.has_answered = isinstance(error, answers) and shown not in _LOST
    return unavailable, _OUTCOMES.get(shown, "unreachable" if shown in _LOST else "error")


def _redis() -> Any:
    try:
        return import_module("redis.asyncio")
    except ImportError as error:
        raise UsageError(
            "--state needs a package that is not installed (redis); install it with: pip install 'kvferry[state]'",
            field="state",
        ) from error
