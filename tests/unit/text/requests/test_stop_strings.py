"""Stop strings are found for any split of the text, and no character is held longer than needed."""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.text.requests.stop_strings import StopMatcher

ALPHABET = "ab é"
stops_strategy = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """Return the text before the occurrence that ends first (the longest of several), and whether there is one."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(st.lists(st.text(ALPHABET, max_size=6), max_size=12), stops_strategy)
def test_any_split_gives_the_result_of_the_definition(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(piece) for piece in pieces) + matcher.finish()
    assert (shown, matcher.matched is not None) == naive("".join(pieces), stops)


@given(st.text(ALPHABET, max_size=30), stops_strategy)
def test_held_text_could_begin_a_stop_string_and_no_shorter_hold_would_do(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = matcher.feed(text)
    if matcher.matched is None:
        held = text[len(shown) :]
        needed = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        assert len(held) == needed


def test_the_match_is_named_and_later_text_is_dropped() -> None:
    matcher = StopMatcher(["END", "STOP"])
    assert matcher.feed("one E") == "one "
    assert matcher.feed("ND two") == ""
    assert matcher.matched == "END"
    assert matcher.feed("three") == ""
    assert matcher.finish() == ""
