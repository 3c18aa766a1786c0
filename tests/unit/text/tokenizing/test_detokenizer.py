"""Concatenated pieces equal the whole text, for any token ids and any split."""

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as FastTokenizer

from kvferry.model import tiny
from kvferry.model.source import ModelSource
from kvferry.text.tokenizing.tokenizer import Detokenizer, Tokenizer

BYTES = tiny.tokenizer(tiny.config())
ids_in_pieces = st.lists(st.lists(st.integers(0, 258), max_size=5), max_size=15)


def feed_all(tokenizer: Tokenizer, pieces: list[list[int]]) -> str:
    detokenizer = Detokenizer(tokenizer)
    return "".join(detokenizer.feed(piece) for piece in pieces) + detokenizer.finish()


@given(ids_in_pieces)
@settings(max_examples=300)
def test_random_bytes_decode_as_the_library_decodes_them(pieces: list[list[int]]) -> None:
    ids = [token for piece in pieces for token in piece]
    assert feed_all(BYTES, pieces) == BYTES.decode(ids) == BYTES._make().decode(ids, skip_special_tokens=True)


def test_random_ids_of_a_real_vocabulary(smollm: ModelSource) -> None:
    @given(st.lists(st.lists(st.integers(0, smollm.config.vocab_size - 1), max_size=4), max_size=12))
    def check(pieces: list[list[int]]) -> None:
        ids = [token for piece in pieces for token in piece]
        library = smollm.tokenizer._fast.decode(ids, skip_special_tokens=True)
        assert feed_all(smollm.tokenizer, pieces) == smollm.tokenizer.decode(ids) == library

    check()


@given(st.text())
def test_only_complete_characters_come_out(text: str) -> None:
    detokenizer = Detokenizer(BYTES)
    shown = ""
    for token in text.encode():
        shown += detokenizer.feed([token])
        assert text.startswith(shown)
    assert shown == text
    assert detokenizer.finish() == ""


def sentence_piece() -> Tokenizer:
    """Return a tokenizer like SentencePiece's: a mark for spaces, bytes as `<0xNN>`, and a decoder with state."""

    def make() -> FastTokenizer:
        words = ["<s>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", "\u2581the", "\u2581cat", "s", "é"]
        fast = FastTokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
        fast.decoder = decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        fast.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
        return fast

    return Tokenizer(make, vocab_size=262)


def test_a_decoder_that_depends_on_neighbours_gives_the_same_text() -> None:
    tokenizer = sentence_piece()
    assert not tokenizer.is_byte_level
    spelled = [0, 258, 259, 260, *(1 + b for b in "🙂".encode()), 257, 261, 0, 258]
    pieces = [[token] for token in spelled]
    assert feed_all(tokenizer, pieces) == tokenizer.decode(spelled) == "the cats🙂 é the"
    assert tokenizer.token_bytes(1 + 0xF0) == b"\xf0"
    assert tokenizer.token_bytes(258) == b" the"


@given(st.lists(st.sampled_from([0, *range(257, 262), *(1 + b for b in "🙂é".encode())]), max_size=20))
def test_the_generic_path_ends_with_the_whole_text_where_bytes_are_valid(ids: list[int]) -> None:
    tokenizer = sentence_piece()
    whole = tokenizer.decode(ids)
    if "\ufffd" not in whole:
        assert feed_all(tokenizer, [[token] for token in ids]) == whole


def runs_between(ids: list[int], separator: int) -> list[list[int]]:
    runs: list[list[int]] = [[]]
    for token in ids:
        if token == separator:
            runs.append([])
        else:
            runs[-1].append(token)
    return runs


@example([196, 0, 160])
@given(st.lists(st.sampled_from([0, *range(257, 262), *(1 + b for b in "🙂é".encode())]), max_size=20))
def test_shown_control_tokens_stand_between_the_texts_around_them(ids: list[int]) -> None:
    for tokenizer in (sentence_piece(), BYTES):
        detokenizer = Detokenizer(tokenizer, shows_control=True)
        mark = "<s>" if tokenizer is not BYTES else "<|endoftext|>"
        own = ids if tokenizer is not BYTES else [256 if i == 0 else i % 256 for i in ids]
        shown = "".join(detokenizer.feed([token]) for token in own) + detokenizer.finish()
        assert shown.count(mark) == ids.count(0)
        # A control token ends an incomplete character, so each run of tokens between control tokens must have whole
        # characters.
        runs = [tokenizer.decode(run) for run in runs_between(own, 256 if tokenizer is BYTES else 0)]
        if not any("\ufffd" in run for run in runs):
            assert shown.replace(mark, "") == tokenizer.decode(own)
        elif tokenizer is BYTES:
            assert shown == mark.join(runs)


def test_a_space_after_a_shown_control_token_stays() -> None:
    detokenizer = Detokenizer(sentence_piece(), shows_control=True)
    assert "".join(detokenizer.feed([token]) for token in [258, 0, 259]) + detokenizer.finish() == "the<s> cat"


def test_marked_control_tokens_have_the_text_that_is_given() -> None:
    model = tiny.config()
    tokenizer = tiny.tokenizer(model)
    ids = [*b"a", 256, *"é".encode(), 257, *b"b", *"é".encode()[:1], 256, *b"c"]
    detokenizer = Detokenizer(tokenizer, marks={256: "<1>"})
    text = "".join(detokenizer.feed((token,)) for token in ids) + detokenizer.finish()
    assert text == "a<1>éb\ufffd<1>c"
    assert Detokenizer(tokenizer).feed(ids[:5]) == "aé"
