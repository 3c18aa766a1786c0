"""The byte alphabet equals that of the tokenizers library."""

from tokenizers import pre_tokenizers

from kvferry.text.tokenizing.byte_level import BYTE_OF, CHARACTER_OF, bytes_of


def test_alphabet_is_a_bijection_onto_the_bytes() -> None:
    assert sorted(BYTE_OF.values()) == list(range(256))
    assert set(BYTE_OF) == set(pre_tokenizers.ByteLevel.alphabet())


def test_spelling_follows_the_library() -> None:
    text = "naïve\n\ttab 漢字 🙂"
    ((spelled, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assert bytes_of(spelled) == text.encode()
    assert "".join(CHARACTER_OF[b] for b in text.encode()) == spelled


def test_a_token_outside_the_alphabet_stands_for_itself() -> None:
    assert bytes_of("漢") == "漢".encode()
