"""Errors of TOML that people write are one kind of exception, and take no time."""

import time

import pytest

from kvferry.core.process.toml_text import parse_toml


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "Expected"),
        (f"x = {'9' * 5000}", "too many digits"),
        (f"x = {'[' * 5000}{']' * 5000}", "nested too deeply"),
        (f"{'a.' * 50_000}a = 1", "more than 256 dots"),
        (f"[{'a.' * 50_000}a]", "more than 256 dots"),
        (f"x = {{{'a.' * 50_000}a = 1}}", "more than 256 dots"),
    ],
)
def test_a_document_that_cannot_be_parsed_is_a_value_error(text: str, message: str) -> None:
    begun = time.monotonic()
    with pytest.raises(ValueError, match=message):
        parse_toml(text)
    assert time.monotonic() - begun < 2.0


def test_lists_of_many_numbers_are_read() -> None:
    assert len(parse_toml(f"x = [{'1.5, ' * 1000}]")["x"]) == 1000
