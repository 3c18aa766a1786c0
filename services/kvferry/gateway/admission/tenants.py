"""The tenants of a gateway: their API keys and policies, from files that are read again when they change.

Keys are kept in memory only as digests.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.core.clock import Clock
from kvferry.core.errors import Overloaded, Unauthenticated, UsageError
from kvferry.gateway.admission.key_guesses import MAX_WRONG_KEYS, KeyGuesses
from kvferry.gateway.decide.flow.tenant_table import MAX_FILE_BYTES, TenantPolicy, TenantTable, read_table

_SCHEME = "bearer "
_log = logging.getLogger(__name__)
_FIELD = "tenants"
PROBE_TENANT = "_stack"
"""Tenant of a local stack's first request, which has no limits; not a valid name in a tenants file."""
Version = tuple[int, int, int]


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


@dataclass(slots=True)
class Tenants:
    """Keys and policies of all tenants. Used on the event loop's thread, except for `read`."""

    keys: ApiKeys
    table: TenantTable = field(default_factory=TenantTable)
    path: Path | None = None
    """The tenants file; `None` without one."""
    has_plain_keys: bool = False
    _seen: Version | None = None
    """Version of the file that was read last, valid or not; `None` before the first read."""

    @classmethod
    def load(cls, path: Path | None, api_keys_file: Path | None, clock: Clock, probe_key: str = "") -> "Tenants":
        """Read the tenants file and the file of plain keys; `None` for a file that is not used.

        Args:
            path: the tenants file.
            api_keys_file: the file of plain keys, a line `key tenant` each.
            clock: clock of the limit on wrong keys.
            probe_key: a further key, of tenant `PROBE_TENANT`, if keys are required; empty for none.

        Raises:
            UsageError: a file cannot be read or is invalid, or no request could be authenticated.
        """
        plain = None if api_keys_file is None else read_keys(api_keys_file)
        has_plain_keys = plain is not None
        seen = None if path is None else _version(path)
        table = TenantTable() if path is None else _read(path, has_plain_keys=has_plain_keys)
        if probe_key and (has_plain_keys or table.keys):
            plain = {**(plain or {}), probe_key: PROBE_TENANT}
        return cls(ApiKeys(plain, clock, table.keys), table, path, has_plain_keys, seen)

    def policy(self, tenant: str) -> TenantPolicy:
        """Return the policy of a tenant."""
        return TenantPolicy() if tenant == PROBE_TENANT else self.table.policy(tenant)

    def read(self) -> TenantTable | None:
        """Read the file if it has changed since the last call; `None` if it has not, or if it is invalid.

        An invalid file is logged once, and the tenants stay as they are. Blocks; may be called on any thread, one call
        at a time.
        """
        if self.path is None:
            return None
        seen = _version(self.path)
        if seen == self._seen:
            return None
        self._seen = seen
        try:
            return _read(self.path, has_plain_keys=self.has_plain_keys)
        except UsageError as error:
            _log.error("the changed tenants file %s is not used: %s; the previous one stays", self.path, error.message)
            return None

    def use(self, table: TenantTable) -> None:
        """Replace the tenants. Requests already admitted continue."""
        self.table = table
        self.keys.replace_hashed(table.keys)
        _log.info("tenants file %s read: %d tenants", self.path, len(table.policies))


def _version(path: Path) -> Version | None:
    """Return modification time in ns, size in bytes and inode of the file; `None` if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path, *, has_plain_keys: bool) -> TenantTable:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the tenants in {path}: {error}", field=_FIELD) from error
    if len(content) > MAX_FILE_BYTES:
        raise UsageError(f"{path} has more than {MAX_FILE_BYTES} bytes; split the tenants over gateways", field=_FIELD)
    table = read_table(text)
    if table.policies and not table.keys and not has_plain_keys:
        raise UsageError(
            f"no tenant in {path} has a key, so requests cannot be assigned to tenants; add keys = [...] with hashes "
            "from `kvferry key hash`, or set --api-keys-file",
            field=_FIELD,
        )
    return table
