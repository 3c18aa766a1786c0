"""Text to token ids and back, from a tokenizer.json or from the vocabulary inside a GGUF file.

Two words that matter here. A *control token* (`<|im_end|>`) steers the model and is written by a chat template
or by end of sequence, never by a person's words; `encode(..., parse_control=False)` turns its text into ordinary
tokens. `chat.py` builds on that.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import tokenizers
from tokenizers import decoders

from kvferry.core.errors import InvalidRequest
from kvferry.model.byte_level import bytes_of


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A token that only templates may write."""

    token_id: int
    text: str
    strips_left: bool = False
    """Whether it swallows white space before it."""
    strips_right: bool = False


class Tokenizer:
    """One model's tokenizer. Immutable after construction; safe to share between threads."""

    def __init__(
        self,
        make: Callable[[], tokenizers.Tokenizer],
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        bos_token_id: int | None = None,
        prefix: tuple[int, ...] = (),
    ) -> None:
        """
        Args:
            make: builds the library's tokenizer; called a second time if text without control tokens is encoded.
            vocab_size: rows of the model's embedding; at least as many as there are tokens.
            eos_token_ids: tokens that end a sequence.
            bos_token_id: the token that begins one; `None`: the model has none.
            prefix: ids that `add_special` puts first, where the library's own post-processor does not.
        """
        self._make = make
        self._fast = make()
        self._prefix = prefix
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.bos_token_id = bos_token_id
        added = self._fast.get_added_tokens_decoder()
        self.control_tokens: Mapping[str, ControlToken] = {
            token.content: ControlToken(token_id, token.content, token.lstrip, token.rstrip)
            for token_id, token in added.items()
            if token.special
        }
        self._control_ids = frozenset(token.token_id for token in self.control_tokens.values())
        self.is_byte_level = isinstance(self._fast.decoder, decoders.ByteLevel)
        """Whether a sequence's text is exactly the UTF-8 of its tokens' bytes put together."""
        self._bytes: dict[int, bytes] = {}

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same tokenizer, for which control tokens are ordinary text."""
        plain = self._make()
        plain.encode_special_tokens = True
        return plain

    @property
    def num_tokens(self) -> int:
        """Tokens in the vocabulary; the model may have more rows than that."""
        return self._fast.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special: bool, parse_control: bool = True) -> list[int]:
        """The token ids of a text.

        Args:
            text: any Unicode text.
            add_special: whether to add what the model wants around a plain prompt (begin of sequence). A chat
                template writes its own, so its output is encoded without.
            parse_control: whether `<|im_end|>` in the text becomes that token, or ordinary tokens that spell it.

        Raises:
            InvalidRequest: the text holds half of a surrogate pair, which no UTF-8 can hold.
        """
        try:
            fast = self._fast if parse_control else self._plain
            ids = fast.encode(text, add_special_tokens=add_special).ids
        except (UnicodeEncodeError, TypeError):
            raise InvalidRequest("the text is not valid Unicode (an unpaired surrogate)", field="text") from None
        return [*self._prefix, *ids] if add_special else ids

    def is_control(self, token_id: int) -> bool:
        """Whether the token is left out of decoded text."""
        return token_id in self._control_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; empty for an id that no token has. A control token gives its own text.

        Where `is_byte_level` is false (SentencePiece vocabularies) white space at the beginning of a text may differ.
        """
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        token = self._fast.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self.is_byte_level:
            # A control token's text is its own, even where the alphabet could read it.
            return token.encode("utf-8") if token_id in self._control_ids else bytes_of(token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("\u2581", " ").encode("utf-8")

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of a whole sequence, control tokens left out, invalid UTF-8 as U+FFFD."""
        kept = [token for token in token_ids if token not in self._control_ids]
        if self.is_byte_level:
            return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")
        return self._fast.decode(kept, skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        """The id of a token given as the vocabulary spells it; `None` when there is none."""
        return self._fast.token_to_id(token)
