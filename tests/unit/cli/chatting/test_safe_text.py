"""Text of a model cannot control the terminal."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.chatting.safe_text import shown, shown_line

HOSTILE = {
    "\x1b]0;title\x07after": "]0;titleafter",
    "\x1b[31mred\x1b[0m": "[31mred[0m",
    "\x9b2Jcleared": "2Jcleared",
    "a\rb\bc\x00d\x7fe\x05": "abcde",
    "\x1bP+q544e\x1b\\": "P+q544e\\",
    "safe \u202etxt.exe\u202c \u2066x\u2069": "safe txt.exe x",
    "lone \ud800 half": "lone \ufffd half",
    "line\n\ttab": "line\n\ttab",
    "Ünïcode 漢字 👩‍👩‍👧 שלום": "Ünïcode 漢字 👩‍👩‍👧 שלום",
}


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_control_characters_are_left_out(text: str) -> None:
    assert shown(text) == HOSTILE[text]


@given(st.text(max_size=50))
def test_no_control_character_is_left_however_the_text_is_split(text: str) -> None:
    assert "".join(map(shown, text)) == shown(text)
    left = {one for one in shown(text) if unicodedata.category(one) in ("Cc", "Cs")}
    assert left <= {"\n", "\t"}


def test_a_line_is_one_line_and_bounded() -> None:
    assert shown_line(" a\n\tb \x1b[2J ") == "a b [2J"
    assert len(shown_line("x" * 5000)) == 500
