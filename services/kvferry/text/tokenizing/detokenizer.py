"""Incremental detokenizer: returns only complete characters; the parts concatenate to the text of the whole
sequence."""

import codecs
from collections.abc import Iterable, Mapping

from kvferry.text.tokenizing.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


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
