"""A compiled grammar and the state of one output under it: which tokens may come next."""

import re
import string
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import CONSTRAINT_DEAD_END, CONSTRAINT_TOO_COMPLEX, InvalidRequest
from kvferry.text.tokenizing.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_DIGITS = 32
"""Maximum number of digits in a row, where the grammar permits something else; JSON does not limit them, and a small
model would write digits until `max_tokens`."""
MAX_EXPONENT_DIGITS = 2
_WORD_BITS = 32
_DIGITS = frozenset(string.digits)
_DIGITS_AT_END = re.compile(rb"([eE][+-]?)?([0-9]+)\Z")
_TAIL_BYTES = MAX_DIGITS + 3


class Numbers:
    """What the bounds of numbers need to know of a vocabulary. Immutable and thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        begin = np.zeros(tokenizer.vocab_size, np.uint8)
        begin[[token for text, token in tokenizer.vocabulary.items() if text[:1] in _DIGITS]] = 1
        self.not_digits = ~np.packbits(begin, bitorder="little")
        """Tokens that do not begin with a digit: [ceil(vocabulary / 8)] uint8."""
        self.letter = tokenizer.vocabulary.get("a")
        """A token that strings permit and numbers do not; `None` leaves numbers without bounds."""
        self.bytes_of = tokenizer.token_bytes


class Grammar:
    """A grammar compiled for a vocabulary. Immutable and thread-safe."""

    def __init__(self, initial: "LLMatcher", vocab_size: int, numbers: Numbers | None = None) -> None:
        """
        Args:
            initial: matcher of an empty output, which is copied for each output.
            vocab_size: number of token ids.
            numbers: bounds numbers; `None` leaves them unbounded.
        """
        self._initial = initial
        self._vocab_size = vocab_size
        self._numbers = numbers

    def start(self) -> "GrammarState":
        """Return the state of an empty output."""
        return GrammarState(self._initial.deep_copy(), self._vocab_size, self._numbers)


class GrammarState:
    """State of one output. Not thread-safe. `allowed_bits` releases the GIL while it computes."""

    def __init__(
        self, matcher: "LLMatcher", vocab_size: int, numbers: Numbers | None = None, tail: bytes = b""
    ) -> None:
        """
        Args:
            matcher: matcher used only for this output.
            vocab_size: number of token ids.
            numbers: bounds numbers; `None` leaves them unbounded.
            tail: the last bytes of the output.
        """
        self._numbers, self._tail = numbers, tail
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._words = np.zeros(-(-vocab_size // _WORD_BITS), np.uint32)
        self._bits = self._words.view(np.uint8)[: -(-vocab_size // 8)]
        self._address, self._num_bytes = self._words.ctypes.data, self._words.nbytes

    def advance(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the output.

        Raises:
            InvalidRequest: the grammar exceeds the limits of work for a step, or a token was not allowed. Any worker
                would reject it, so that the request is not retried.
        """
        if not token_ids or self._matcher.consume_tokens(list(token_ids)):
            if self._numbers is not None:
                added = b"".join(map(self._numbers.bytes_of, token_ids[-_TAIL_BYTES:]))
                self._tail = (self._tail + added)[-_TAIL_BYTES:]
            return
        error = self._matcher.get_error()
        if is_limit(error):
            raise too_complex(error)
        raise contradiction(f"{len(token_ids)} tokens do not follow it: {first_line(error)}")

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Compute which tokens may come next: [vocabulary] bool; see `allowed_bits`."""
        return np.unpackbits(self.allowed_bits(), count=self._vocab_size, bitorder="little").view(np.bool_)

    def allowed_bits(self) -> npt.NDArray[np.uint8]:
        """Compute which tokens may come next: [ceil(vocabulary / 8)] uint8, one bit per token, the lowest bit of a byte
        first. At the end of the grammar only the end-of-sequence tokens may.

        Raises:
            InvalidRequest: the grammar exceeds the limits of work for a step, or permits none of the vocabulary's
                tokens.
        """
        self._matcher.unsafe_compute_mask_ptr(self._address, self._num_bytes)
        if self._matcher.is_error():
            error = self._matcher.get_error()
            raise dead_end() if _DEAD_END_SIGN in error else too_complex(error)
        if not self._words.any():
            raise dead_end()
        return self._bits.copy() if self._numbers is None else self._bounded(self._numbers)

    def _bounded(self, numbers: Numbers) -> npt.NDArray[np.uint8]:
        found = _DIGITS_AT_END.search(self._tail)
        limit = MAX_EXPONENT_DIGITS if found is not None and found[1] else MAX_DIGITS
        if found is None or len(found[2]) < limit or numbers.letter is None:
            return self._bits.copy()
        if self._bits[numbers.letter >> 3] >> (numbers.letter & 7) & 1:
            return self._bits.copy()  # in a string
        ended = self._bits & numbers.not_digits
        return ended if ended.any() else self._bits.copy()

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must follow whatever the model prefers: the tokenization of the only text that may
        come next. Empty if several strings may."""
        return list(self._matcher.compute_ff_tokens())

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of the tokens may come next in succession."""
        return self._matcher.validate_tokens(list(token_ids)) if token_ids else 0

    def copy(self) -> "GrammarState":
        """Return an independent copy of this state."""
        return GrammarState(self._matcher.deep_copy(), self._vocab_size, self._numbers, self._tail)

    @property
    def is_accepting(self) -> bool:
        """Whether the output so far is complete; it may be possible to extend it."""
        return self._matcher.is_accepting()


_DEAD_END_SIGN = "NoExtension"
_LIMIT_SIGNS = ("limit", "too complex", "too large", "too many", "max is", "fuel", "panic")


def is_limit(error: str) -> bool:
    """Return whether an error of the parser means that it exceeded a limit on its work. Panics count too, since the
    parser's arithmetic panics when a number overflows."""
    return any(sign in error.lower() for sign in _LIMIT_SIGNS)


def dead_end() -> InvalidRequest:
    """Return the error for an output that no token can continue, for example if the grammar matches no text at all."""
    return InvalidRequest(
        "the constraint cannot be continued with any token of this model; change its grammar or schema",
        field="constraint",
        reason=CONSTRAINT_DEAD_END,
    )


def contradiction(found: str) -> InvalidRequest:
    """Return the error for a grammar whose library contradicts itself with this model's tokens."""
    return InvalidRequest(
        f"the constraint cannot be used with this model's tokens: {found}; change its grammar or schema",
        field="constraint",
        reason=CONSTRAINT_DEAD_END,
    )


def too_complex(error: str) -> InvalidRequest:
    """Return the error for a grammar whose parsing exceeds a limit of work."""
    return InvalidRequest(
        f"the constraint is too complex for constrained decoding: {first_line(error)}",
        field="constraint",
        reason=CONSTRAINT_TOO_COMPLEX,
    )


_MAX_ERROR_CHARS = 300


def first_line(error: str) -> str:
    """Return the first line of a parser's error, truncated, and the line with the cause if there is one; other lines
    show the grammar or a stack."""
    line, _, rest = error.strip().partition("\n")
    line += "".join(f" {cause}" for cause in rest.split("\n") if cause.startswith("error:"))
    return line if len(line) <= _MAX_ERROR_CHARS else line[: _MAX_ERROR_CHARS - 1] + "…"
