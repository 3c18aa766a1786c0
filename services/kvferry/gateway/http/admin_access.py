"""Changes by the admin API: they need a token of a file, except on loopback without one, and each is logged."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.errors import Forbidden, KvferryError, Overloaded, Unauthenticated, UsageError, shortened
from kvferry.core.rare_lines import RareLines, more
from kvferry.gateway.admission.key_guesses import MAX_WRONG_KEYS, KeyGuesses
from kvferry.gateway.http.browsers import SAFE_METHODS
from kvferry.gateway.http.client_api import error_response

MIN_TOKEN_CHARS = 16
LOCAL = "loopback"
"""Name in the log of who makes a change without a token, on a loopback address."""
_FIELD = "admin_token_file"
_FLAG = "--admin-token-file"
WHO = "kvferry.who"
"""Key of an ASGI scope: name of who makes a change."""
_MAX_FILE_BYTES = 64 << 10
_UNNAMED = "token"
_SCHEME = "bearer "
_log = logging.getLogger(__name__)
_audit = logging.getLogger("kvferry.audit")
_audit.setLevel(logging.INFO)  # changes are logged at every --log-level


class ChangesOff(Forbidden):
    """No change is accepted, since this gateway has no token for changes."""

    reason = "CHANGES_NOT_ALLOWED"


@dataclass(frozen=True, slots=True)
class AdminToken:
    """A token that permits changes."""

    value: bytes
    name: str
    """Name of its holder, for the log."""


def read_tokens(path: Path) -> Sequence[AdminToken]:
    """Read a file with a line `TOKEN [NAME]` for each token; empty lines and lines that begin with `#` are ignored.

    Raises:
        UsageError: the file cannot be read, has no token, or a line is invalid; the message contains the line number,
            never the line.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the tokens in {path}: {error}; see {_FLAG}", field=_FIELD) from None
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2 or len(words[0]) < MIN_TOKEN_CHARS or not line.isprintable():
            raise UsageError(
                f"line {number} of {path} must have a token of at least {MIN_TOKEN_CHARS} characters and at most one "
                "name",
                field=_FIELD,
            )
        found.append(AdminToken(words[0].encode(), words[1] if len(words) == 2 else _UNNAMED))
    if not found:
        raise UsageError(f"{path} has no token; add a line `TOKEN [NAME]`", field=_FIELD)
    return found


@dataclass(frozen=True, slots=True)
class AdminAccess:
    """Who may make changes."""

    is_local: bool
    """Whether the admin port is bound to loopback."""
    path: Path | None = None
    """The file of tokens, read for each change; `None` for no tokens."""
    clock: Clock = field(default_factory=SystemClock)
    guesses: KeyGuesses = field(default_factory=KeyGuesses)
    """Unknown tokens by the address that sent them."""

    def warn(self) -> None:
        """Log a warning if no change would be accepted because of the file."""
        if self.path is not None:
            try:
                read_tokens(self.path)
            except UsageError as error:
                _log.warning("the admin port refuses changes: %s", error.message)

    async def name_of(self, authorization: str | None, address: str) -> str:
        """Return the name of who makes a change.

        Args:
            authorization: value of the `Authorization` header; `None` if there is none.
            address: host of the client, by which unknown tokens are counted.

        Raises:
            ChangesOff: there is no valid file of tokens, and it is given or the port is not bound to loopback.
            Unauthenticated: the token is missing or unknown.
            Overloaded: too many unknown tokens came from this address within the last minute.
        """
        if self.path is None:
            if self.is_local:
                return LOCAL
            raise ChangesOff(
                f"changes on an address that is not loopback need a token; start the gateway with {_FLAG}, or send "
                "the request to an admin port on loopback"
            )
        try:
            tokens = await asyncio.to_thread(read_tokens, self.path)
        except UsageError as error:
            _log.error("the admin port refuses changes: %s", error.message)
            raise ChangesOff(f"the file of {_FLAG} has no valid token; the gateway's log has the cause") from None
        if authorization is None or not authorization.lower().startswith(_SCHEME):
            raise Unauthenticated(f"changes need a token of {_FLAG}; send `Authorization: Bearer <token>`")
        given = authorization[len(_SCHEME) :].strip().encode("utf-8", "surrogateescape")
        digest, now = sha256(given).digest(), self.clock.monotonic()
        if wait := self.guesses.wait_seconds(address, digest, now):
            raise Overloaded(
                f"{MAX_WRONG_KEYS} unknown tokens came from {address} within a minute; retry in {wait:.0f} s",
                reason="TOO_MANY_KEYS",
                retry_after_seconds=wait,
            )
        names = [token.name for token in tokens if compare_digest(token.value, given)]  # compares with every token
        if names:
            self.guesses.note_right(address, digest)
        else:
            self.guesses.note_wrong(address, now)
            raise Unauthenticated(f"unknown token; send one of the file of {_FLAG}")
        return names[0]


class ChangeGuard:
    """ASGI wrapper that lets changes pass only with access, and logs each: every method but GET and HEAD is a change,
    so that no route can be forgotten."""

    def __init__(self, inner: ASGIApp, access: AdminAccess) -> None:
        """
        Args:
            inner: the application.
            access: who may make changes.
        """
        self._inner = inner
        self._access = access
        self._refusals = RareLines(access.clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS:
            await self._inner(scope, receive, send)
            return
        route = f"{scope['method']} {shortened(scope['path'])!r}"
        try:
            who = await self._access.name_of(Headers(scope=scope).get("authorization"), (scope["client"] or ("",))[0])
        except KvferryError as refused:
            left_out = self._refusals.left_out(refused.reason) if isinstance(refused, Overloaded) else 0
            if left_out is not None:
                _audit.info("change refused: %s: %s%s", route, refused.reason, more(left_out))
            await error_response(refused)(scope, receive, send)
            return
        status = 500
        scope[WHO] = who

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._inner(scope, receive, send_noted)
        finally:
            _audit.info("change by %s: %s: %d", who, route, status)
