"""Token ids to text as they come: complete characters only, and in the end exactly the text of the whole sequence."""

import codecs
from collections.abc import Iterable

from kvferry.model.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """One sequence's text so far.

    Everything returned by `feed` and `finish`, put together, equals `tokenizer.decode` of all ids, however the ids
    were cut into calls. A character whose bytes are spread over tokens appears with its last byte; bytes that can
    never become a character appear as U+FFFD. Control tokens give no text.
    """

    __slots__ = ("_decoder", "_emitted", "_pending", "_settled", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # For tokenizers that are not byte-level: ids whose text is out, ids whose text may still change.
        self._settled: list[int] = []
        self._pending: list[int] = []
        self._emitted = 0

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that these ids complete; may be empty."""
        tokenizer = self._tokenizer
        kept = [token for token in token_ids if not tokenizer.is_control(token)]
        if tokenizer.is_byte_level:
            return self._decoder.decode(b"".join(map(tokenizer.token_bytes, kept)))
        return "".join(self._feed_window(token) for token in kept)

    def finish(self) -> str:
        """What was held back; the sequence is over."""
        if self._tokenizer.is_byte_level:
            return self._decoder.decode(b"", final=True)
        rest = self._window_text()[self._emitted :]
        self._settled, self._pending, self._emitted = [], [], 0
        return rest

    def _feed_window(self, token_id: int) -> str:
        """Decode the ids since the last settled point; text that may still be half a character waits.

        Decoders look at neighbours (a leading space belongs to the word before), so the window keeps the ids of the
        previous piece in front and subtracts their text.
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
