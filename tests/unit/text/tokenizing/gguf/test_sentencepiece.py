"""A SentencePiece vocabulary of a GGUF file gives the tokens that merging by scores gives."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.text.tokenizing.gguf.sentencepiece import (
    BYTE,
    CONTROL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    merges_of,
    sentencepiece,
)

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
HEAD = ["<unk>", "<s>", "</s>"]
LETTERS = [*"abc", SPACE]


def merged(text: str, words: dict[str, float]) -> list[str]:
    """Merge the adjacent pieces whose concatenation has the highest score, the leftmost first, until there are none."""
    pieces = list(text.replace(" ", SPACE))
    while True:
        best = max(
            (
                (words[left + right], -index)
                for index, (left, right) in enumerate(pairwise(pieces))
                if left + right in words
            ),
            default=None,
        )
        if best is None:
            return pieces
        at = -best[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@st.composite
def vocabularies(draw: st.DrawFn) -> dict[str, float]:
    """Words that can be merged from their letters, with decreasing scores, as SentencePiece learns them."""
    words = list(LETTERS)
    for _ in range(draw(st.integers(0, 12))):
        word = draw(st.sampled_from(words)) + draw(st.sampled_from(words))
        if word not in words and len(word) <= 6:
            words.append(word)
    return {word: -float(number) for number, word in enumerate(words)}


@settings(max_examples=300)
@given(vocabularies(), st.text("abc ", max_size=12))
def test_merges_have_the_effect_of_scores(words: dict[str, float], text: str) -> None:
    tokens = [*HEAD, *BYTES, *words]
    scores = [0.0] * (len(HEAD) + len(BYTES)) + list(words.values())
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[1] * len(words)]
    fast = sentencepiece(tokens, merges_of(tokens, scores, types), types, adds_space=False)
    found = fast.encode(text, add_special_tokens=False)
    assert "".join(found.tokens) == text.replace(" ", SPACE)
    # Words of equal score at overlapping places may be cut differently, so a repeated letter is left out.
    if not any(a == b for a, b in pairwise(text)):
        assert found.tokens == merged(text, words)
    assert fast.decode(found.ids) == text


def test_spaces_bytes_and_marked_tokens() -> None:
    tokens = [*HEAD, *BYTES, *LETTERS, SPACE + "a", SPACE + SPACE, "\n\n", "<tool>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[1] * 5, *[USER_DEFINED] * 3]
    scores = [0.0] * len(tokens)
    plain = sentencepiece(tokens, merges_of(tokens, scores, types), types, adds_space=False)
    assert plain.encode("a  b\n\n<tool>é", add_special_tokens=False).tokens == [
        "a", SPACE + SPACE, "b", "\n\n", "<tool>", "<0xC3>", "<0xA9>",
    ]  # fmt: skip
    spaced = sentencepiece(tokens, merges_of(tokens, scores, types), types, adds_space=True)
    assert spaced.encode("a b", add_special_tokens=False).tokens == [SPACE + "a", SPACE, "b"]
    ids = spaced.encode("a é", add_special_tokens=False).ids
    assert spaced.decode(ids) == "a é"
