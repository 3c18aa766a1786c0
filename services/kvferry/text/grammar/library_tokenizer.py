"""The tokenizer for the grammar library, which tokenizes text that a grammar forces."""

import json
import secrets
from typing import TYPE_CHECKING, Any

from kvferry.text.tokenizing.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def library_tokenizer(tokenizer: Tokenizer) -> "LLTokenizer":
    """Make the library's tokenizer for a vocabulary.

    Raises:
        Exception: the library cannot read the tokenizer; it raises several types.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(
        without_control_texts(tokenizer),
        n_vocab=tokenizer.vocab_size,
        eos_token=list(tokenizer.eos_token_ids),
        slices=LLTokenizer.json_slices(),
    )


def without_control_texts(tokenizer: Tokenizer) -> str:
    """Return the tokenizer in the format of tokenizer.json, with texts of control tokens that no grammar spells.

    The library encodes forced text with the whole tokenizer, which would turn a control token's text, for example in a
    constant of a schema, into that token. The grammar does not allow it there, or the token ends the output.
    """
    contents: dict[str, Any] = json.loads(tokenizer.to_json())
    # A random name, since a request can spell any other.
    prefix = secrets.token_hex(16)
    renamed = {text: f"<{prefix}-{token.token_id}>" for text, token in tokenizer.control_tokens.items()}
    for token in contents["added_tokens"]:
        token["content"] = renamed.get(token["content"], token["content"])
    model = contents["model"]
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {renamed.get(text, text): token_id for text, token_id in model["vocab"].items()}
    elif isinstance(model.get("vocab"), list):  # Unigram: texts and scores
        model["vocab"] = [[renamed.get(text, text), score] for text, score in model["vocab"]]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = renamed.get(model["unk_token"], model["unk_token"])
    return json.dumps(contents)
