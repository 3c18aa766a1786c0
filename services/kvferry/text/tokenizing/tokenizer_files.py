"""Creates a tokenizer from a tokenizer.json, and checks tokenizers of all files."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import tokenizers

from kvferry.core.errors import InvalidRequest, ModelFileError
from kvferry.text.tokenizing.tokenizer import Tokenizer, panics_as_exceptions
from kvferry.weights.config import ModelConfig
from kvferry.weights.files.regular_file import read_file

_ID = re.compile("[0-9]{1,9}")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def tokenizer_from_json(path: Path, config: ModelConfig, settings: Mapping[str, object] | None = None) -> Tokenizer:
    """Create a tokenizer from a tokenizer.json.

    Args:
        path: the file.
        config: configuration of the model.
        settings: content of tokenizer_config.json, of which `added_tokens_decoder` is read: a token is a control token
            if either file has its flag `special`, as in transformers 5.23. `None` if there is no such file.

    Raises:
        ModelFileError: the file is missing or invalid, or has more tokens than the model.
    """
    try:
        text = read_file(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelFileError(f"cannot read {path}: {error}") from error

    specials = _specials((settings or {}).get("added_tokens_decoder"))

    def make() -> tokenizers.Tokenizer:
        try:
            with panics_as_exceptions():
                fast = tokenizers.Tokenizer.from_str(text)
                _mark(fast, specials)
        except Exception as error:  # the library raises nothing narrower
            raise ModelFileError(f"{path} is not a usable tokenizer.json: {error}") from error
        fast.no_truncation()  # truncation, set for training, would shorten prompts without an error
        fast.no_padding()
        return fast

    return checked(make, config, (), str(path))


def _specials(entries: object) -> Mapping[int, tokenizers.AddedToken]:
    """Return the tokens with the flag `special` of `added_tokens_decoder`, by id; other entries are left out."""
    found: dict[int, tokenizers.AddedToken] = {}
    for key, entry in entries.items() if isinstance(entries, dict) else ():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not (isinstance(content, str) and _ID.fullmatch(key) and entry.get("special") is True):
            continue
        flags = {name: entry.get(name) is True for name in _FLAGS}
        found[int(key)] = tokenizers.AddedToken(content, special=True, **flags)
    return found


def _mark(fast: tokenizers.Tokenizer, specials: Mapping[int, tokenizers.AddedToken]) -> None:
    """Make tokens of the vocabulary control tokens; a token with another id there, or none, stays as it is."""
    added = fast.get_added_tokens_decoder()
    fast.add_special_tokens(
        [
            token
            for token_id, token in specials.items()
            if fast.token_to_id(token.content) == token_id and not (token_id in added and added[token_id].special)
        ]
    )


def checked(
    make: Callable[[], tokenizers.Tokenizer], config: ModelConfig, prefix: tuple[int, ...], where: str
) -> Tokenizer:
    """Create a tokenizer, and check that all its token ids are in the model's vocabulary.

    Args:
        make: creates the library's tokenizer.
        config: configuration of the model, with the vocabulary size and the ids of control tokens.
        prefix: token ids that begin a text with special tokens; see `Tokenizer`.
        where: the file, for error messages.

    Raises:
        ModelFileError: the tokenizer cannot be created or used, or has token ids beyond the model's vocabulary.
    """
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
    try:
        special = tokenizer.encode("", add_special=True)
    except InvalidRequest as error:  # its post-processor names a token that it does not define, for example
        raise ModelFileError(
            f"{where} is not a usable tokenizer: it cannot encode an empty text; download it again"
        ) from error
    ids = [*tokenizer.vocabulary.values(), *special]
    largest = max(ids, default=0)
    if largest >= config.vocab_size:
        raise ModelFileError(
            f"{where}: the tokenizer has a token with id {largest}, but the model has only {config.vocab_size} tokens;"
            " use the tokenizer of this model"
        )
    return tokenizer
