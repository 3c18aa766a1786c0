import pytest

from kvferry.core.errors import Unauthenticated, UsageError
from kvferry.gateway.http.api_keys import ApiKeys


def test_without_keys_everybody_is_the_default_tenant():
    assert ApiKeys(None).tenant_of(None) == ApiKeys(None).tenant_of("Bearer x") == ""


@pytest.mark.parametrize("header", ["Bearer one", "bearer one", "BEARER  one "])
def test_a_known_key_names_its_tenant(header):
    assert ApiKeys({"one": "acme"}).tenant_of(header) == "acme"


@pytest.mark.parametrize("header", [None, "", "one", "Bearer", "Bearer ", "Bearer two", "Basic one", "Bearer one two"])
def test_anything_else_is_refused_without_quoting_it(header):
    with pytest.raises(Unauthenticated) as caught:
        ApiKeys({"one": "acme"}).tenant_of(header)
    assert "two" not in caught.value.message


def test_an_empty_file_lets_nobody_in(tmp_path):
    (tmp_path / "keys").write_text("# nobody yet\n")
    with pytest.raises(Unauthenticated):
        ApiKeys.load(tmp_path / "keys").tenant_of("Bearer x")


@pytest.mark.parametrize("line", ["just-a-key", "key tenant more"])
def test_a_bad_line_is_named_by_number_and_not_quoted(tmp_path, line):
    (tmp_path / "keys").write_text(f"good tenant\n{line}\n")
    with pytest.raises(UsageError, match="line 2") as caught:
        ApiKeys.load(tmp_path / "keys")
    assert line not in caught.value.message


def test_a_missing_file_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        ApiKeys.load(tmp_path / "none")
