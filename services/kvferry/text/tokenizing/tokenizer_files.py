"""Creates a tokenizer from a tokenizer.json, and checks tokenizers of all files."""

from collections.abc import Callable
from pathlib import Path

import tokenizers

from kvferry.core.errors import InvalidRequest, ModelFileError
from kvferry.text.tokenizing.tokenizer import Tokenizer, panics_as_exceptions
from kvferry.weights.config import ModelConfig
from kvferry.weights.files.regular_file import read_file


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

    return checked(make, config, (), str(path))


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
