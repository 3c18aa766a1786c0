"""API keys and their tenants, read from a file and kept in memory only as digests."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from kvferry.core.clock import Clock
from kvferry.core.errors import Overloaded, Unauthenticated, UsageError
from kvferry.gateway.admission.key_guesses import MAX_WRONG_KEYS, KeyGuesses

_SCHEME = "bearer "


class ApiKeys:
    """Maps API keys to tenants. Stores only SHA-256 digests of the keys and never logs a key."""

    def __init__(
        self, tenants: Mapping[str, str] | None, clock: Clock, hashed: Mapping[bytes, str] | None = None
    ) -> None:
        """
        Args:
            tenants: dictionary from key to tenant; `None` for no plain keys.
            clock: clock of the limit on wrong keys.
            hashed: dictionary from SHA-256 digest of a key to tenant. If there are neither plain nor hashed keys,
                authentication is disabled, and all requests use the default tenant.
        """
        self._clock = clock
        self._guesses = KeyGuesses()
        self._plain = {key_digest(key): tenant for key, tenant in (tenants or {}).items()}
        self._tenants = None if tenants is None and not hashed else {**(hashed or {}), **self._plain}

    @property
    def tenants(self) -> frozenset[str]:
        """Names of all tenants that have a key."""
        return frozenset((self._tenants or {}).values())

    def replace_hashed(self, hashed: Mapping[bytes, str]) -> None:
        """Replace the hashed keys. Authentication, once enabled, stays enabled even without keys."""
        if self._tenants is not None or hashed:
            self._tenants = {**hashed, **self._plain}

    @classmethod
    def load(cls, path: Path | None, clock: Clock) -> "ApiKeys":
        """Read a file of keys (`read_keys`); `None` disables authentication.

        Raises:
            UsageError: the file cannot be read, or a line is invalid; the message contains the line number, never the
                line.
        """
        return cls(None if path is None else read_keys(path), clock)

    @property
    def are_required(self) -> bool:
        """Whether requests need a key."""
        return self._tenants is not None

    def tenant_of(self, authorization: str | None, address: str) -> str:
        """Return the tenant of a request; empty if authentication is disabled.

        Args:
            authorization: value of the `Authorization` header; `None` if there is none.
            address: host of the client, by which unknown keys are counted.

        Raises:
            Unauthenticated: authentication is enabled, and the key is missing or unknown.
            Overloaded: too many unknown keys came from this address within the last minute.
        """
        if self._tenants is None:
            return ""
        if authorization is None or not authorization.lower().startswith(_SCHEME):
            raise Unauthenticated("no API key; send `Authorization: Bearer <key>`")
        # Looked up by digest, so that the timing reveals nothing about the key's prefix.
        digest, now = key_digest(authorization[len(_SCHEME) :].strip()), self._clock.monotonic()
        if wait := self._guesses.wait_seconds(address, digest, now):
            raise Overloaded(
                f"{MAX_WRONG_KEYS} unknown API keys came from {address} within a minute; retry in {wait:.0f} s",
                reason="TOO_MANY_KEYS",
                retry_after_seconds=wait,
            )
        tenant = self._tenants.get(digest)
        if tenant is not None:
            self._guesses.note_right(address, digest)
        else:
            self._guesses.note_wrong(address, now)
            raise Unauthenticated("unknown API key; ask this gateway's administrator for a valid key")
        return tenant


def read_keys(path: Path) -> dict[str, str]:
    """Read lines of `key tenant`, tenant by key; empty lines and lines that begin with `#` are ignored.

    Raises:
        UsageError: the file cannot be read, or a line is invalid; the message contains the line number, never the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the API keys in {path}: {error}", field="api_keys_file") from error
    tenants: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise UsageError(
                f"line {number} of {path} has {len(words)} fields; it must have a key and a tenant",
                field="api_keys_file",
            )
        tenants[words[0]] = words[1]
    return tenants


def key_digest(key: str) -> bytes:
    """Return the SHA-256 digest of a key, the only form in which the gateway stores keys."""
    return hashlib.sha256(key.encode()).digest()
