"""API keys and their tenants, read from a file and kept in memory only as digests."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from kvferry.core.errors import Unauthenticated, UsageError

_SCHEME = "bearer "


class ApiKeys:
    """Maps API keys to tenants. Immutable; stores only SHA-256 digests of the keys and never logs a key."""

    def __init__(self, tenants: Mapping[str, str] | None) -> None:
        """
        Args:
            tenants: dictionary from key to tenant; `None` disables authentication, and all requests use the default
                tenant.
        """
        self._tenants = None if tenants is None else {_digest(key): tenant for key, tenant in tenants.items()}

    @classmethod
    def load(cls, path: Path | None) -> "ApiKeys":
        """Read a file of keys (`read_keys`); `None` disables authentication.

        Raises:
            UsageError: the file cannot be read, or a line is invalid; the message contains the line number, never the
                line.
        """
        return cls(None if path is None else read_keys(path))

    def tenant_of(self, authorization: str | None) -> str:
        """Return the tenant for the value of an `Authorization` header.

        Raises:
            Unauthenticated: authentication is enabled, and the key is missing or unknown.
        """
        if self._tenants is None:
            return ""
        if authorization is None or not authorization.lower().startswith(_SCHEME):
            raise Unauthenticated("no API key; send `Authorization: Bearer <key>`")
        # Looked up by digest, so that timing reveals nothing about a key's prefix.
        tenant = self._tenants.get(_digest(authorization[len(_SCHEME) :].strip()))
        if tenant is None:
            raise Unauthenticated("unknown API key; ask this gateway's administrator for a valid key")
        return tenant


def read_keys(path: Path) -> dict[str, str]:
    """Read lines of `key tenant`, tenant by key; empty lines and lines that begin with `#` are ignored.

    Raises:
        UsageError: the file cannot be read, or a line is invalid; the message has its number, never its text.
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
                f"line {number} of {path} has {len(words)} fields; write a key and a tenant", field="api_keys_file"
            )
        tenants[words[0]] = words[1]
    return tenants


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
