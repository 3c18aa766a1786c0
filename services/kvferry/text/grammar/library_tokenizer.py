"""The tokenizer for the grammar library, which tokenizes text that a grammar forces."""

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvferry.text.answers.marks import Marks
from kvferry.text.grammar.lark_text import NamedTokens
from kvferry.text.tokenizing.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_NAMED = re.compile(r"<[!-~]*>")
"""Text that the library takes for the name of a control token; without spaces, it is its own spelling in vocabularies
of bytes."""
_UNLIKELY = -1e9
"""Score of a token that text is never split into."""


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


def named_tokens(tokenizer: Tokenizer) -> NamedTokens:
    """Return the tokens that grammars refer to by id: control tokens, and markers of answers."""
    control = {text: token.token_id for text, token in tokenizer.control_tokens.items()}
    markers = Marks.of(control, tokenizer.added_tokens).token_ids
    return NamedTokens({**control, **markers}, tuple(text for text in markers if text not in control))


def without_control_texts(tokenizer: Tokenizer) -> str:
    """Return the tokenizer in the format of tokenizer.json, as the library needs it.

    - No grammar spells the text of a token that is referred to by id. The library encodes forced text with the whole
      tokenizer, which would turn a control token's text, for example in a constant of a schema, into that token. The
      grammar does not allow it there, or the token ends the output.
    - Other added tokens of the form `<...>` are ordinary tokens of the vocabulary. The library takes an added token of
      this form for a control token, whatever its flag says (llguidance 1.9), and its text could not contain it.
    """
    contents: dict[str, Any] = json.loads(tokenizer.to_json())
    # A random name, since a request can spell any other.
    prefix = secrets.token_hex(16)
    renamed = {text: f"<{prefix}-{token_id}>" for text, token_id in named_tokens(tokenizer).by_id.items()}
    model = contents["model"]
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {renamed.get(text, text): token_id for text, token_id in model["vocab"].items()}
    elif isinstance(model.get("vocab"), list):  # Unigram: texts and scores
        model["vocab"] = [[renamed.get(text, text), score] for text, score in model["vocab"]]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = renamed.get(model["unk_token"], model["unk_token"])
    contents["added_tokens"] = list(_added(contents["added_tokens"], model, renamed))
    return json.dumps(contents)


def _added(tokens: Sequence[dict[str, Any]], model: dict[str, Any], renamed: Mapping[str, str]) -> Iterator[object]:
    """Yield the added tokens that stay; each of them is also put into the vocabulary of `model`, in place, since the
    library numbers added tokens after the last token of the vocabulary."""
    for token in sorted(tokens, key=lambda token: int(token["id"])):
        text = token["content"]
        is_known = _has_token(model, renamed.get(text, text), token["id"])
        if text in renamed or not is_known or not _NAMED.fullmatch(text):
            yield {**token, "content": renamed.get(text, text)}


def _has_token(model: dict[str, Any], text: str, token_id: int) -> bool:
    """Return whether the vocabulary of `model` has a token, which is added in place if there is a place for it."""
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        return bool(vocab.setdefault(text, token_id) == token_id)
    if isinstance(vocab, list) and token_id == len(vocab):
        vocab.append([text, _UNLIKELY])
    return isinstance(vocab, list) and token_id < len(vocab) and bool(vocab[token_id][0] == text)
