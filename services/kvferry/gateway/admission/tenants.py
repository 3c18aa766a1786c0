"""The tenants of a gateway: their keys and policies, from a file that is read again when it changes."""

import logging
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.core.clock import Clock
from kvferry.core.errors import UsageError
from kvferry.gateway.admission.api_keys import ApiKeys, read_keys
from kvferry.gateway.decide.flow.policy import TenantPolicy
from kvferry.gateway.decide.flow.tenant_table import MAX_FILE_BYTES, TenantTable, read_table

_log = logging.getLogger(__name__)
_FIELD = "tenants"
PROBE_TENANT = "_stack"
"""Tenant of a local stack's first request, which has no limits; not a valid name in a tenants file."""
Version = tuple[int, int, int]


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
