"""Creates a tokenizer from the header of a GGUF file."""

from collections.abc import Callable, Mapping

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from kvferry.core.errors import ModelFileError
from kvferry.text.tokenizing.gguf.pre_tokenizers import RULES
from kvferry.text.tokenizing.gguf.sentencepiece import CONTROL, USER_DEFINED, merges_of, sentencepiece
from kvferry.text.tokenizing.tokenizer import Tokenizer, panics_as_exceptions
from kvferry.text.tokenizing.tokenizer_files import checked
from kvferry.weights.checkpoints.gguf.header import Array, Value
from kvferry.weights.config import ModelConfig

_MERGES_PER_TOKEN = 16
"""Maximum number of merges per token of the vocabulary; published vocabularies have fewer than 3."""
_MAX_TOKEN_CHARS = 256
"""Longest token of a SentencePiece vocabulary; it bounds the time to list its merges."""


def tokenizer_from_gguf(pairs: Mapping[str, Value], config: ModelConfig, where: str) -> Tokenizer:
    """Create a tokenizer from a GGUF file's header.

    Args:
        pairs: key-value pairs of the header.
        config: configuration of the model.
        where: the file, for messages.

    Raises:
        ModelFileError: the tokenizer is neither byte-level BPE nor BPE of SentencePiece, its rule to split text is
            unknown, or its lists are inconsistent.
    """
    kind = pairs.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelFileError(
            f"{where}: tokenizer {kind!r} is not supported; use gpt2 (byte-level BPE) or llama (SentencePiece BPE)"
        )
    tokens = _strings(pairs, "tokenizer.ggml.tokens", where)
    types = _numbers(pairs, "tokenizer.ggml.token_type", len(tokens), where)
    if len(set(tokens)) != len(tokens):
        raise ModelFileError(f"{where}: a token appears twice in tokenizer.ggml.tokens")
    if kind == "llama":
        make, adds_bos = _sentencepiece(pairs, tokens, types, where), True
    else:
        make, adds_bos = _byte_level(pairs, tokens, types, where)
    adds_bos = pairs.get("tokenizer.ggml.add_bos_token", adds_bos) is True
    bos = config.bos_token_id
    if bos is not None and not 0 <= bos < len(tokens):
        raise ModelFileError(f"{where}: tokenizer.ggml.bos_token_id is {bos}, but there are {len(tokens)} tokens")
    return checked(make, config, (bos,) if adds_bos and bos is not None else (), where)


def _byte_level(
    pairs: Mapping[str, Value], tokens: list[str], types: list[int], where: str
) -> tuple[Callable[[], tokenizers.Tokenizer], bool]:
    """Return a function that creates the library's tokenizer, and whether prompts have a beginning-of-sequence
    token by default."""
    pre = pairs.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in RULES:
        raise ModelFileError(f"{where}: pre-tokenizer {pre!r} is not supported; use one of {', '.join(RULES)}")
    rule = RULES[pre]
    # There is one embedding row per token, so file size bounds the vocabulary, and with it this limit.
    max_merges = _MERGES_PER_TOKEN * len(tokens)
    merges = [_pair(merge, where) for merge in _strings(pairs, "tokenizer.ggml.merges", where, max_merges)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}

    def make() -> tokenizers.Tokenizer:
        try:
            with panics_as_exceptions():
                bpe = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule.prefers_whole_words)
        except Exception as error:  # the library raises no subclass; usually a merge of unknown tokens
            raise ModelFileError(f"{where}: vocabulary and merges are inconsistent: {error}") from error
        fast = tokenizers.Tokenizer(bpe)
        fast.pre_tokenizer = rule.make()
        fast.decoder = decoders.ByteLevel()
        if rule.is_composed:
            fast.normalizer = normalizers.NFC()
        marked = [(token, types[token_id]) for token, token_id in vocabulary.items()]
        fast.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in marked if k == CONTROL])
        fast.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in marked if k == USER_DEFINED])
        return fast

    return make, rule.adds_bos


def _sentencepiece(
    pairs: Mapping[str, Value], tokens: list[str], types: list[int], where: str
) -> Callable[[], tokenizers.Tokenizer]:
    scores = _numbers(pairs, "tokenizer.ggml.scores", len(tokens), where)
    longest = max(map(len, tokens))
    if longest > _MAX_TOKEN_CHARS:
        raise ModelFileError(
            f"{where}: a token of tokenizer.ggml.tokens has {longest} characters; at most {_MAX_TOKEN_CHARS} are"
            " accepted"
        )
    adds_space = pairs.get("tokenizer.ggml.add_space_prefix", True) is True
    merges = merges_of(tokens, scores, types)

    def make() -> tokenizers.Tokenizer:
        try:
            with panics_as_exceptions():
                return sentencepiece(tokens, merges, types, adds_space=adds_space)
        except Exception as error:  # the library raises no subclass
            raise ModelFileError(f"{where}: vocabulary and scores are inconsistent: {error}") from error

    return make


def _numbers(pairs: Mapping[str, Value], key: str, count: int, where: str) -> list[int]:
    array = pairs.get(key)
    found = array.numbers().tolist() if isinstance(array, Array) else []
    if len(found) != count:
        raise ModelFileError(f"{where}: {key} does not match the {count} tokens")
    return found


def _strings(pairs: Mapping[str, Value], key: str, where: str, limit: int | None = None) -> list[str]:
    array = pairs.get(key)
    if not isinstance(array, Array):
        raise ModelFileError(f"{where}: {key} is missing or not a list of strings")
    if limit is not None and len(array) > limit:
        raise ModelFileError(f"{where}: {key} has {len(array)} strings; at most {limit} are accepted")
    try:
        values = array.strings()
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{where}: a string of {key} is not UTF-8: {error.reason}") from None
    if not values:
        raise ModelFileError(f"{where}: {key} is missing or not a list of strings")
    return values


def _pair(merge: str, where: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise ModelFileError(f"{where}: {merge!r} is not a merge of two tokens")
    return left, right
