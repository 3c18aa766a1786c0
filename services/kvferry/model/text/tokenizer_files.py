"""Creates tokenizers from model files: a tokenizer.json, or a GGUF file's vocabulary and merges.

The GGUF key `tokenizer.ggml.pre` selects the pre-tokenizer, which splits text before merging. The rules follow
llama.cpp (src/llama-vocab.cpp), in the form of the models' tokenizer.json files. Unknown names are rejected, since a
wrong pre-tokenizer silently degrades the model's output.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from kvferry.core.errors import ModelFileError
from kvferry.model.config import ModelConfig
from kvferry.model.files.gguf_header import Array, Value
from kvferry.model.files.regular_file import read_file
from kvferry.model.text.panics import panics_as_exceptions
from kvferry.model.text.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4
_MERGES_PER_TOKEN = 16
"""Maximum number of merges per token of the vocabulary; published vocabularies have fewer than 3."""
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _digits_alone() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _by_pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
    cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": _digits_alone,
    "llama-bpe": lambda: _by_pattern(_WORDS % r"\p{N}{1,3}"),
    "qwen2": lambda: _by_pattern(_WORDS % r"\p{N}"),
}


def tokenizer_from_json(path: Path, config: ModelConfig) -> Tokenizer:
    """Create a tokenizer from a tokenizer.json.

    Raises:
        ModelFileError: the file is missing or invalid, or has more tokens than the model.
    """
    try:
        text = read_file(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelFileError(f"cannot read {path}: {error}") from error

    def make() -> tokenizers.Tokenizer:
        try:
            with panics_as_exceptions():
                fast = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise ModelFileError(f"{path} is not a usable tokenizer.json: {error}") from error
        fast.no_truncation()  # truncation, set for training, would shorten prompts without an error
        fast.no_padding()
        return fast

    return _checked(make, config, (), str(path))


def tokenizer_from_gguf(pairs: Mapping[str, Value], config: ModelConfig, where: str) -> Tokenizer:
    """Create a tokenizer from a GGUF file's header.

    Raises:
        ModelFileError: the tokenizer is not byte-level BPE, its pre-tokenizer is unknown, or its lists are
            inconsistent.
    """
    kind, pre = pairs.get("tokenizer.ggml.model"), pairs.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ModelFileError(f"{where}: tokenizer {kind!r} is not supported; only gpt2 (byte-level BPE) is")
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ModelFileError(f"{where}: pre-tokenizer {pre!r} is not supported; use one of {known}")
    tokens = _strings(pairs, "tokenizer.ggml.tokens", where)
    # There is one embedding row per token, so file size bounds the vocabulary, and with it this limit.
    max_merges = _MERGES_PER_TOKEN * len(tokens)
    merges = [_pair(merge, where) for merge in _strings(pairs, "tokenizer.ggml.merges", where, max_merges)]
    stored_types = pairs.get("tokenizer.ggml.token_type")
    types = stored_types.numbers().tolist() if isinstance(stored_types, Array) else []
    if len(types) != len(tokens):
        raise ModelFileError(f"{where}: tokenizer.ggml.token_type does not match the {len(tokens)} tokens")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelFileError(f"{where}: a token appears twice in tokenizer.ggml.tokens")

    def make() -> tokenizers.Tokenizer:
        try:
            with panics_as_exceptions():
                bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")
        except Exception as error:  # the library raises no subclass; usually a merge of unknown tokens
            raise ModelFileError(f"{where}: vocabulary and merges are inconsistent: {error}") from error
        fast = tokenizers.Tokenizer(bpe)
        fast.pre_tokenizer = _PRE_TOKENIZERS[pre]()
        fast.decoder = decoders.ByteLevel()
        if pre == "qwen2":
            fast.normalizer = normalizers.NFC()
        marked = [(token, types[token_id]) for token, token_id in vocab.items()]
        fast.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in marked if k == _CONTROL])
        fast.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in marked if k == _USER_DEFINED])
        return fast

    adds_bos = pairs.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") is True
    bos = config.bos_token_id
    return _checked(make, config, (bos,) if adds_bos and bos is not None else (), where)


def _checked(
    make: Callable[[], tokenizers.Tokenizer], config: ModelConfig, prefix: tuple[int, ...], where: str
) -> Tokenizer:
    tokenizer = Tokenizer(
        make,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        prefix=prefix,
    )
    if tokenizer.num_tokens > config.vocab_size:
        raise ModelFileError(
            f"{where}: the tokenizer has {tokenizer.num_tokens} tokens, but the model has only {config.vocab_size}"
        )
    return tokenizer


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
