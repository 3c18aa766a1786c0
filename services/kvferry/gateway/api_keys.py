"""Who may call, and as which tenant: a file of keys, kept only as digests."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from kvferry.core.errors import Unauthenticated, UsageError

_SCHEME = "bearer "


class ApiKeys:
    """Keys and their tenants. Immutable; knows no key in the clear and never logs one."""

    def __init__(self, tenants: Mapping[str, str] | None) -> None:
        """
        Args:
            tenants: tenant by key; `None` lets everybody in as the default tenant.
        """
        self._tenants = None if tenants is None else {_digest(key): tenant for key, tenant in tenants.items()}

    @classmethod
    def load(cls, path: Path | None) -> "ApiKeys":
        """Read lines of `key tenant`; empty lines and those that begin with `#` do not count.

        Raises:
            UsageError: the file cannot be read, or a line is not understood (named by number, never quoted).
        """
        if path is None:
            return cls(None)
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
                    f"line {number} of {path} has {len(words)} words; write a key and a tenant", field="api_keys_file"
                )
            tenants[words[0]] = words[1]
        return cls(tenants)

    def tenant_of(self, authorization: str | None) -> str:
        """The tenant for the value of an `Authorization` header.

        Raises:
            Unauthenticated: keys are asked for and this is none of them.
        """
        if self._tenants is None:
            return ""
        if authorization is None or not authorization.lower().startswith(_SCHEME):
            raise Unauthenticated("no API key; send `Authorization: Bearer <key>`")
        # Looked up by digest, so that the time it takes tells nothing about how much of a key was right.
        tenant = self._tenants.get(_digest(authorization[len(_SCHEME) :].strip()))
        if tenant is None:
            raise Unauthenticated("the API key is not known here")
        return tenant


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
