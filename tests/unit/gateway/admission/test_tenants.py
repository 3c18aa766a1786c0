"""The tenants file of a running gateway: hashed and plain keys, reload, and files that are not used."""

import hashlib
import os
from pathlib import Path

import pytest

from kvferry.core.clock import SystemClock
from kvferry.core.errors import Unauthenticated, UsageError
from kvferry.gateway.admission.tenants import PROBE_TENANT, Tenants
from kvferry.gateway.decide.flow.tenant_table import TenantPolicy

CLOCK = SystemClock()


def hashed(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def tenant(name: str, key: str, more: str = "") -> str:
    return f'[tenants.{name}]\nkeys = ["{hashed(key)}"]\n{more}\n'


class File:
    """A tenants file whose every version has its own time of modification."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.time = 1_000_000_000

    def write(self, text: str) -> None:
        self.path.write_text(text)
        self.time += 1
        os.utime(self.path, ns=(self.time, self.time))


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "tenants.toml")


def who(tenants: Tenants, key: str) -> str:
    return tenants.keys.tenant_of(f"Bearer {key}", "127.0.0.1")


def test_hashed_and_plain_keys_name_their_tenants(file, tmp_path):
    file.write(tenant("a", "key-of-a", "weight = 3"))
    plain = tmp_path / "keys"
    plain.write_text("key-of-b b\n")
    tenants = Tenants.load(file.path, plain, CLOCK)
    assert (who(tenants, "key-of-a"), who(tenants, "key-of-b")) == ("a", "b")
    assert (tenants.policy("a").weight, tenants.policy("b")) == (3, TenantPolicy())
    with pytest.raises(Unauthenticated):
        who(tenants, "key-of-c")
    with pytest.raises(Unauthenticated):
        who(tenants, hashed("key-of-a"))


def test_a_changed_file_is_read_once(file):
    file.write(tenant("a", "old-key"))
    tenants = Tenants.load(file.path, None, CLOCK)
    assert tenants.read() is None
    file.write(tenant("b", "new-key", "concurrent_requests = 2"))
    table = tenants.read()
    assert table is not None
    tenants.use(table)
    assert tenants.read() is None
    assert (who(tenants, "new-key"), tenants.policy("b").concurrent_requests) == ("b", 2)
    with pytest.raises(Unauthenticated):
        who(tenants, "old-key")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tenants.a]\nweight = -1", "tenants.a.weight must be a number from 0.001"),
        ("nonsense", "is not TOML"),
        ("[tenants.a]\nweight = 1", "has a key"),
        (None, "cannot read"),
    ],
)
def test_an_invalid_file_is_not_used_and_logged_once(file, caplog, text, words):
    file.write(tenant("a", "old-key"))
    tenants = Tenants.load(file.path, None, CLOCK)
    if text is None:
        file.path.unlink()
    else:
        file.write(text)
    assert [tenants.read() for _ in range(3)] == [None] * 3
    assert who(tenants, "old-key") == "a"
    logged = [record.getMessage() for record in caplog.records if "is not used" in record.message]
    assert len(logged) == 1
    assert words in logged[0]


def test_authentication_stays_on_without_keys(file):
    file.write(tenant("a", "old-key"))
    tenants = Tenants.load(file.path, None, CLOCK)
    file.write("[default]\nweight = 1")
    table = tenants.read()
    assert table is not None
    tenants.use(table)
    with pytest.raises(Unauthenticated):
        tenants.keys.tenant_of(None, "127.0.0.1")


def test_without_keys_everyone_is_the_default_tenant(file):
    file.write("[default]\nconcurrent_requests = 1")
    tenants = Tenants.load(file.path, None, CLOCK, probe_key="probe")
    assert tenants.keys.tenant_of(None, "127.0.0.1") == ""
    assert tenants.policy("").concurrent_requests == 1


def test_the_key_of_a_stack_has_no_limits(file):
    file.write("[default]\nmodels = ['none']\n" + tenant("a", "key"))
    tenants = Tenants.load(file.path, None, CLOCK, probe_key="probe")
    assert who(tenants, "probe") == PROBE_TENANT
    assert tenants.policy(PROBE_TENANT) == TenantPolicy()
    table = tenants.table
    tenants.use(table)
    assert who(tenants, "probe") == PROBE_TENANT


def test_a_file_in_which_no_tenant_has_a_key_is_refused_at_start(file):
    file.write("[tenants.a]\nweight = 1")
    with pytest.raises(UsageError, match="kvferry key hash"):
        Tenants.load(file.path, None, CLOCK)


def test_a_missing_file_is_refused_at_start(tmp_path):
    with pytest.raises(UsageError, match="cannot read the tenants"):
        Tenants.load(tmp_path / "none.toml", None, CLOCK)


def test_a_large_file_is_refused(file):
    file.write("#" * ((4 << 20) + 1))
    with pytest.raises(UsageError, match="has more than 4194304 bytes"):
        Tenants.load(file.path, None, CLOCK)
