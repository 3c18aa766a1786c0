import pytest

from kvferry.core.clock import ManualClock
from kvferry.core.errors import Overloaded, Unauthenticated, UsageError
from kvferry.gateway.admission.key_guesses import MAX_WRONG_KEYS, WINDOW_SECONDS, KeyGuesses
from kvferry.gateway.admission.tenants import ApiKeys

CLOCK = ManualClock()
ADDRESS = "10.0.0.9"


def test_without_keys_every_client_is_the_default_tenant():
    assert ApiKeys(None, CLOCK).tenant_of(None, ADDRESS) == ApiKeys(None, CLOCK).tenant_of("Bearer x", ADDRESS) == ""


@pytest.mark.parametrize("header", ["Bearer one", "bearer one", "BEARER  one "])
def test_a_known_key_names_its_tenant(header):
    assert ApiKeys({"one": "acme"}, CLOCK).tenant_of(header, ADDRESS) == "acme"


@pytest.mark.parametrize("header", [None, "", "one", "Bearer", "Bearer ", "Bearer two", "Basic one", "Bearer one two"])
def test_anything_else_is_refused_without_quoting_it(header):
    with pytest.raises(Unauthenticated) as caught:
        ApiKeys({"one": "acme"}, CLOCK).tenant_of(header, ADDRESS)
    assert "two" not in caught.value.message


def test_with_an_empty_file_no_key_is_valid(tmp_path):
    (tmp_path / "keys").write_text("# no keys yet\n")
    with pytest.raises(Unauthenticated):
        ApiKeys.load(tmp_path / "keys", CLOCK).tenant_of("Bearer x", ADDRESS)


@pytest.mark.parametrize("line", ["just-a-key", "key tenant more"])
def test_a_bad_line_is_named_by_number_and_not_quoted(tmp_path, line):
    (tmp_path / "keys").write_text(f"good tenant\n{line}\n")
    with pytest.raises(UsageError, match="line 2") as caught:
        ApiKeys.load(tmp_path / "keys", CLOCK)
    assert line not in caught.value.message


def test_a_missing_file_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        ApiKeys.load(tmp_path / "none", CLOCK)


def test_guesses_of_one_address_are_slowed_and_other_clients_are_not():
    clock = ManualClock()
    keys = ApiKeys({"one": "acme", "two": "other"}, clock)
    assert keys.tenant_of("Bearer one", ADDRESS) == "acme"
    for number in range(MAX_WRONG_KEYS):
        with pytest.raises(Unauthenticated):
            keys.tenant_of(f"Bearer guess {number}", ADDRESS)
    for guess in ("Bearer guess", "Bearer two"):  # "two" is a valid key that this address has not used before
        with pytest.raises(Overloaded) as caught:
            keys.tenant_of(guess, ADDRESS)
        assert caught.value.retry_after_seconds == WINDOW_SECONDS
    assert keys.tenant_of("Bearer one", ADDRESS) == "acme"
    assert keys.tenant_of("Bearer two", "10.0.0.10") == "other"
    clock.advance(WINDOW_SECONDS)
    assert keys.tenant_of("Bearer two", ADDRESS) == "other"


def test_a_call_without_a_key_does_not_count_as_a_guess():
    keys = ApiKeys({"one": "acme"}, CLOCK)
    for _ in range(2 * MAX_WRONG_KEYS):
        with pytest.raises(Unauthenticated):
            keys.tenant_of(None, "10.0.0.11")
    assert keys.tenant_of("Bearer one", "10.0.0.11") == "acme"


def test_addresses_are_forgotten_above_a_limit():
    guesses = KeyGuesses()
    for number in range(100_000):
        guesses.note_wrong(str(number), 0.0)
        guesses.note_right(str(number), b"digest")
    assert len(guesses._wrong) == len(guesses._used) == 4096
