"""The text of a sequence: its end, the reason for it, and the tokens that it includes."""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.inference.chunks import StopReason
from kvferry.core.sampling import FinishReason, SampledToken, SamplingParams
from kvferry.model import tiny
from kvferry.text.requests.output_text import OutputText
from kvferry.text.requests.stop_strings import StopMatcher
from kvferry.text.tokenizing.tokenizer import Detokenizer

TOKENIZER = tiny.tokenizer(tiny.config())
END_OF_TEXT = 256


def written(
    ids: list[int], step: int, finish: FinishReason = FinishReason.LENGTH, **params: object
) -> tuple[str, int, FinishReason | None, StopReason]:
    """Add tokens in steps of `step`; return the text, the number of tokens, the finish reason and the stop reason."""
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    detokenizer = Detokenizer(TOKENIZER, shows_control=not sampling.skip_special_tokens)
    output = OutputText(sampling, detokenizer, StopMatcher(sampling.stop) if sampling.stop else None)
    text, count = "", 0
    for start in range(0, len(ids), step):
        tokens = tuple(map(SampledToken, ids[start : start + step]))
        last = start + step >= len(ids)
        shown, kept, reason, stop_reason = output.add(tokens, finish if last else None)
        text, count = text + shown, count + len(kept)
        if reason is not None:
            return text, count, reason, stop_reason
    raise AssertionError("not ended")


def test_a_stop_string_is_cut_or_kept_and_named() -> None:
    ids = list(b"one END two")
    assert written(ids, 2, stop=("x", "END")) == ("one ", 7, FinishReason.STOP, "END")
    kept = written(ids, 2, stop=("END",), include_stop_str_in_output=True)
    assert kept == ("one END", 7, FinishReason.STOP, "END")
    assert written(ids, 3, stop=("no",)) == ("one END two", 11, FinishReason.LENGTH, None)


def test_a_stop_token_is_named_and_an_end_of_sequence_token_is_not() -> None:
    ids = [*b"ab", 7]
    assert written(ids, 1, FinishReason.STOP, stop_token_ids=(7,)) == ("ab\x07", 3, FinishReason.STOP, 7)
    assert written([*b"ab", END_OF_TEXT], 1, FinishReason.STOP) == ("ab", 3, FinishReason.STOP, None)
    assert written(ids, 1, FinishReason.LENGTH, stop_token_ids=(7,))[3] is None


@given(
    st.text("ab", min_size=1, max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 8),
    st.integers(1, 4),
    st.booleans(),
)
def test_a_stop_string_that_ends_before_min_tokens_is_ignored(
    text: str, stops: list[str], min_tokens: int, step: int, includes: bool
) -> None:
    made = written(
        list(text.encode()), step, stop=tuple(stops), min_tokens=min_tokens, include_stop_str_in_output=includes
    )
    for end in range(min_tokens + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            shown = text[: end if includes else end - len(longest)]
            assert made == (shown, end, FinishReason.STOP, longest)
            break
    else:
        assert made == (text, len(text), FinishReason.LENGTH, None)


def test_control_tokens_are_shown_on_request() -> None:
    ids = [*b"a", 0xC3, 257, *b"b", 258]
    assert written(ids, 1) == ("a\ufffdb", 5, FinishReason.LENGTH, None)
    assert written(ids, 1, skip_special_tokens=False)[0] == "a\ufffd<|im_start|>b<|im_end|>"
    stopped = written(ids, 1, skip_special_tokens=False, stop=("_start|",))
    assert stopped == ("a\ufffd<|im", 3, FinishReason.STOP, "_start|")
