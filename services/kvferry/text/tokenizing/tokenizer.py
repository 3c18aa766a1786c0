"""Tokenizer: converts between text and token ids; built from a tokenizer.json or a GGUF file's vocabulary.

A *control token* (`<|im_end|>`) structures a conversation or ends a sequence; it may come from a chat template, but
never from user text. `encode(..., parse_control=False)` encodes its text as ordinary tokens, which
`tools.conversations` relies on.

The *detokenizer* of a stream returns only complete characters; the parts concatenate to the text of the whole sequence.
"""

import codecs
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import tokenizers
from tokenizers import decoders

from kvferry.core.errors import InvalidRequest
from kvferry.core.process.config import tokenize_on_one_thread
from kvferry.text.tokenizing.byte_level import bytes_of

_MAX_SHORTENING = 4
_REPLACEMENT = "\ufffd"


class LibraryPanic(Exception):
    """The library's Rust code panicked: it reached a state that its authors considered impossible."""


@contextmanager
def panics_as_exceptions() -> Iterator[None]:
    """Raise `LibraryPanic` for a panic in the `with` block.

    The library's runtime raises a panic as a `BaseException` of a class that cannot be imported, which handlers of
    `Exception` do not catch.

    Raises:
        LibraryPanic: the library panicked.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise LibraryPanic(str(error)) from None


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A token that only chat templates may produce."""

    token_id: int
    text: str
    strips_left: bool = False
    """Whether whitespace before the token is removed."""
    strips_right: bool = False


class Tokenizer:
    """The tokenizer of a model. Immutable and thread-safe."""

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
            make: function that creates the library's tokenizer; called again for the first text with
                `parse_control=False`.
            vocab_size: number of rows of the model's embedding; at least the number of tokens.
            eos_token_ids: end-of-sequence tokens.
            bos_token_id: beginning-of-sequence token; `None` if the model has no such token.
            prefix: ids that `add_special` prepends, if the library's post-processor does not.
        """
        tokenize_on_one_thread()
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
        self.added_tokens: Mapping[str, int] = {token.content: token_id for token_id, token in added.items()}
        """Ids by text of the tokens that text is split at first, control tokens included. Those without the flag
        `special` are text, such as `<tool_call>` of Qwen's models."""
        self._control_ids = frozenset(token.token_id for token in self.control_tokens.values())
        self.is_byte_level = isinstance(self._fast.decoder, decoders.ByteLevel)
        """Whether a sequence's text is exactly the UTF-8 decoding of its tokens' concatenated bytes."""
        self._bytes: dict[int, bytes] = {}

    @functools.cached_property
    def max_token_chars(self) -> int:
        """Maximum number of characters of text per token. Known normalizers shorten text by a factor of less than
        `_MAX_SHORTENING`."""
        longest = max(map(len, self._fast.get_vocab(with_added_tokens=True)), default=1)
        return longest if self._fast.normalizer is None else longest * _MAX_SHORTENING

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A copy of the tokenizer that encodes control tokens as ordinary text."""
        plain = self._make()
        plain.encode_special_tokens = True
        return plain

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the vocabulary; the model's embedding may have more rows."""
        return self._fast.get_vocab_size(with_added_tokens=True)

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Id of each token, control tokens included."""
        return self._fast.get_vocab(with_added_tokens=True)

    def encode(self, text: str, *, add_special: bool, parse_control: bool = True) -> list[int]:
        """Convert text to token ids.

        Args:
            text: any Unicode text.
            add_special: whether to add the model's special tokens (beginning of sequence) to a plain prompt. The output
                of a chat template already has them.
            parse_control: whether `<|im_end|>` in the text becomes the control token; otherwise it becomes ordinary
                tokens.

        Raises:
            InvalidRequest: the text has an unpaired surrogate, which UTF-8 cannot encode.
        """
        try:
            fast = self._fast if parse_control else self._plain
            with panics_as_exceptions():
                # The batch call does not compute the offsets of tokens, which take a third of the time.
                ids = fast.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
        except (UnicodeEncodeError, TypeError):
            raise InvalidRequest("the text is not valid Unicode (an unpaired surrogate)", field="text") from None
        except Exception:  # the file is inconsistent, for example without an unknown token
            raise InvalidRequest("the text cannot be encoded by this model's tokenizer", field="text") from None
        return [*self._prefix, *ids] if add_special else ids

    def to_json(self) -> str:
        """Return the tokenizer in the format of tokenizer.json."""
        return self._fast.to_str()

    def is_control(self, token_id: int) -> bool:
        """Return whether the token is a control token, which is omitted from decoded text."""
        return token_id in self._control_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for an unused id. For a control token, the bytes of its text.

        If `is_byte_level` is false (SentencePiece vocabularies), whitespace at the start of the text may differ.
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
            # Never decode a control token's text with the byte alphabet.
            return token.encode("utf-8") if token_id in self._control_ids else bytes_of(token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("\u2581", " ").encode("utf-8")

    def decode(self, token_ids: Iterable[int]) -> str:
        """Convert a complete sequence to text, without control tokens; invalid UTF-8 becomes U+FFFD.

        Raises:
            InvalidRequest: the model's tokenizer cannot decode the tokens.
        """
        kept = [token for token in token_ids if token not in self._control_ids]
        if self.is_byte_level:
            return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")
        try:
            with panics_as_exceptions():
                return self._fast.decode(kept, skip_special_tokens=False)
        except Exception:
            raise InvalidRequest("the tokens cannot be decoded by this model's tokenizer", field="token_ids") from None

    def token_id(self, token: str) -> int | None:
        """Return the id of the token with this text in the vocabulary; `None` if it does not exist."""
        return self._fast.token_to_id(token)


class Detokenizer:
    """Detokenizes a sequence incrementally.

    The concatenated results of `feed` and `finish` equal `tokenizer.decode` of all ids, for any split of the ids into
    calls. A character whose bytes are spread over several tokens is returned with its last byte; invalid bytes become
    U+FFFD. Control tokens have no text, unless they are shown.
    """

    __slots__ = ("_decoder", "_emitted", "_marks", "_pending", "_settled", "_shows_control", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, *, shows_control: bool = False, marks: Mapping[int, str] | None = None
    ) -> None:
        """
        Args:
            tokenizer: the model's tokenizer.
            shows_control: whether control tokens appear in the text.
            marks: strings that replace control tokens in the text in any case, by token id; see `answers.marks`.
        """
        self._tokenizer = tokenizer
        self._shows_control = shows_control
        self._marks = marks or {}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # For tokenizers that are not byte-level: ids whose text was returned, ids whose text may still change.
        self._settled: list[int] = []
        self._pending: list[int] = []
        self._emitted = 0

    def feed(self, token_ids: Iterable[int]) -> str:
        """Add ids and return the text that they complete; may be empty."""
        tokenizer = self._tokenizer
        if self._shows_control or self._marks:
            return "".join(map(self._feed_shown, token_ids))
        kept = [token for token in token_ids if not tokenizer.is_control(token)]
        if tokenizer.is_byte_level:
            return self._decoder.decode(b"".join(map(tokenizer.token_bytes, kept)))
        return "".join(self._feed_window(token) for token in kept)

    def finish(self) -> str:
        """End the sequence and return the held-back text."""
        if self._tokenizer.is_byte_level:
            return self._decoder.decode(b"", final=True)
        rest = self._window_text()[self._emitted :]
        self._settled, self._pending, self._emitted = [], [], 0
        return rest

    def _feed_shown(self, token_id: int) -> str:
        """Add one id, whose text may be returned even if it is a control token. A shown control token ends an
        incomplete character before it."""
        tokenizer = self._tokenizer
        if not tokenizer.is_control(token_id):
            if tokenizer.is_byte_level:
                return self._decoder.decode(tokenizer.token_bytes(token_id))
            return self._feed_window(token_id)
        shown = self._marks.get(token_id)
        if shown is None:
            if not self._shows_control:
                return ""
            shown = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        if tokenizer.is_byte_level:
            rest = self._decoder.decode(b"", final=True)
        else:
            rest = self._window_text()[self._emitted :]
            if self._pending:
                self._settled, self._pending = self._pending, []
            self._emitted = len(self._window_text())
        return rest + shown

    def _feed_window(self, token_id: int) -> str:
        """Decode the ids since the last complete character; hold back text that may be an incomplete character.

        Decoders depend on context (for example, whether a leading space is kept), so the window starts with the ids of
        the previous part, whose text is then removed.
        """
        self._pending.append(token_id)
        text = self._window_text()
        if text.endswith(_REPLACEMENT) or len(text) <= self._emitted:
            return ""
        new = text[self._emitted :]
        self._settled, self._pending = self._pending, []
        self._emitted = len(self._window_text())
        return new

    def _window_text(self) -> str:
        return self._tokenizer.decode([*self._settled, *self._pending])
