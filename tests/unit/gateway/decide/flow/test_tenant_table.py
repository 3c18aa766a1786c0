"""The tenants file: fields, and errors that name field, value and remedy."""

import contextlib
import hashlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import UsageError
from kvferry.gateway.decide.flow.tenant_table import TenantPolicy, TenantTable, read_table

_DIGEST = hashlib.sha256(b"secret").digest()
_KEY = f"sha256:{_DIGEST.hex()}"
_WHOLE = f"""
[default]
requests_per_minute = 30

[tenants.search]
keys = ["{_KEY}"]
weight = 2.5
priority = [-10, 100]
requests_per_minute = 600
request_burst = 20
tokens_per_minute = 100000
token_burst = 5000
concurrent_requests = 8
max_queued = 100
max_queued_bytes = 1000000
models = ["smollm2"]
"""


def test_every_field_is_read():
    table = read_table(_WHOLE)
    assert table.keys == {_DIGEST: "search"}
    assert table.policy("search") == TenantPolicy(
        weight=2.5,
        priority=(-10, 100),
        requests_per_minute=600,
        request_burst=20,
        tokens_per_minute=100_000,
        token_burst=5000,
        concurrent_requests=8,
        models=frozenset({"smollm2"}),
        max_queued=100,
        max_queued_bytes=1_000_000,
    )
    assert table.policy("other") == table.policy("") == TenantPolicy(requests_per_minute=30)
    assert _DIGEST.hex() not in repr(table)


def test_the_documented_file_is_valid():
    page = Path(__file__).parents[5] / "docs" / "flow-control.md"
    (text,) = re.findall(r"^```toml\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    table = read_table(text)
    assert set(table.policies) == set(table.keys.values()) == {"search", "batch"}


def test_an_empty_file_limits_nothing():
    assert read_table("") == TenantTable()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tenants", "is not TOML"),
        ("tenant = 1", "tenant is unknown; use [default] and [tenants.NAME]"),
        ("tenants = 3", "tenants must be a table"),
        ("[tenants]\na = 1", "tenants.a must be a table"),
        ("[tenants.'a b']", "tenants.a b is not a valid tenant name"),
        ("[tenants._stack]", "tenants._stack is not a valid tenant name"),
        ("[tenants.a]\nwieght = 1", "tenants.a.wieght is unknown; known fields: keys, weight"),
        ("[tenants.a]\nweight = 0", "tenants.a.weight must be a number from 0.001 to 1e+06, not 0"),
        ("[tenants.a]\nweight = nan", "tenants.a.weight must be a number"),
        ("[tenants.a]\nweight = true", "not True"),
        ("[tenants.a]\nconcurrent_requests = 1.5", "must be a whole number from 1"),
        ("[tenants.a]\ntokens_per_minute = '5'", "tenants.a.tokens_per_minute must be a number from 1"),
        ("[tenants.a]\ntoken_burst = 5", "tenants.a.token_burst has no effect without tokens_per_minute"),
        ("[tenants.a]\npriority = [5, 1]", "must be [smallest, largest]"),
        ("[tenants.a]\npriority = [0, 1001]", "from -1000 to 1000, not [0, 1001]"),
        ("[tenants.a]\npriority = 3", "must be [smallest, largest]"),
        ("[tenants.a]\nmodels = []", "must be a list of model names, not []; leave it out to allow all"),
        ("[tenants.a]\nkeys = 'x'", "tenants.a.keys must be a list"),
        ("[default]\nkeys = []", "default.keys is not allowed"),
        ("default = 1", "default must be a table"),
        (f"[tenants.a]\nkeys = ['{_KEY}']\n[tenants.b]\nkeys = ['{_KEY}']", "tenants.b.keys has a key that tenant 'a'"),
        ("[tenants.a]\nmodels = [" + "'m'," * 257 + "]", "has 257 names; at most 256"),
    ],
)
def test_errors_name_the_field_with_its_remedy(text, words):
    with pytest.raises(UsageError) as wrong:
        read_table(text)
    assert words in wrong.value.message
    assert wrong.value.field == "tenants"


def test_a_plain_key_is_refused_and_not_shown():
    with pytest.raises(UsageError, match="kvferry key hash") as wrong:
        read_table('[tenants.a]\nkeys = ["my-plain-key"]')
    assert "my-plain-key" not in wrong.value.message
    assert "tenants.a.keys.0" in wrong.value.message


def test_the_number_of_tenants_is_bounded():
    with pytest.raises(UsageError, match="has 4097 tenants; at most 4096"):
        read_table("[tenants]\n" + "\n".join(f"t{n} = {{}}" for n in range(4097)))


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(UsageError):
        assert isinstance(read_table(text), TenantTable)
