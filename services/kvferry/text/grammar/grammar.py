"""A compiled grammar and the state of one output under it: which tokens may come next."""

import re
import string
import threading
from collections.abc import Callable, Sequence
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
MAX_RENEWALS = 8
"""Maximum number of times that one output begins again with new states."""
_WORD_BITS = 32
_DIGITS = frozenset(string.digits)
_DIGITS_AT_END = re.compile(rb"([eE][+-]?)?([0-9]+)\Z")
_TAIL_BYTES = MAX_DIGITS + 3


class Numbers:
    """Facts about a vocabulary that the bounds of numbers use. Immutable and thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        begin = np.zeros(tokenizer.vocab_size, np.uint8)
        begin[[token for text, token in tokenizer.vocabulary.items() if text[:1] in _DIGITS]] = 1
        self.not_digits = ~np.packbits(begin, bitorder="little")
        """Tokens that do not begin with a digit: [ceil(vocabulary / 8)] uint8."""
        self.letter = tokenizer.vocabulary.get("a")
        """A token that strings permit and numbers do not; `None` leaves numbers without bounds."""
        self.bytes_of = tokenizer.token_bytes


class Grammar:
    """A grammar compiled for a vocabulary. Thread-safe.

    All outputs share the states that their texts have visited, whose number is limited. When it is reached, the grammar
    is compiled again, and later outputs begin without states.
    """

    def __init__(self, make: Callable[[], "LLMatcher"], vocab_size: int, numbers: Numbers | None = None) -> None:
        """
        Args:
            make: compiles the grammar, and returns the matcher of an empty output, which is copied for each output.
            vocab_size: number of token ids.
            numbers: bounds numbers; `None` leaves them unbounded.

        Raises:
            InvalidRequest: see `GrammarCompiler.compile`.
        """
        self._make = make
        self._lock = threading.Lock()
        self._initial = make()
        self.vocab_size = vocab_size
        self.numbers = numbers

    def start(self) -> "GrammarState":
        """Return the state of an empty output."""
        return GrammarState(self, self._initial)

    def renewed(self, initial: "LLMatcher") -> "LLMatcher":
        """Return the matcher of an empty output without the states of `initial`, which an output was copied from."""
        with self._lock:
            if self._initial is initial:
                self._initial = self._make()
            return self._initial


class GrammarState:
    """State of one output. Not thread-safe. `allowed_bits` releases the GIL while it computes."""

    def __init__(self, grammar: Grammar, initial: "LLMatcher") -> None:
        """
        Args:
            grammar: the compiled grammar.
            initial: its matcher of an empty output.
        """
        self._grammar, self._initial, self._matcher = grammar, initial, initial.deep_copy()
        self._tokens: list[int] = []
        self._tail = b""
        """The last bytes of the output."""
        self._num_renewals = 0
        vocab_size = grammar.vocab_size
        self._words = np.zeros(-(-vocab_size // _WORD_BITS), np.uint32)
        self._bits = self._words.view(np.uint8)[: -(-vocab_size // 8)]
        self._address, self._num_bytes = self._words.ctypes.data, self._words.nbytes

    def advance(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the output.

        Raises:
            InvalidRequest: the grammar exceeds the limits of work for a step, or a token was not allowed. Any worker
                would reject it, so that the request is not retried.
        """
        if not token_ids:
            return
        self._tokens += token_ids
        if not self._matcher.consume_tokens(list(token_ids)):
            error = self._matcher.get_error()
            if _STATES_SIGN not in error or not self._begin_again():
                if is_limit(error):
                    raise too_complex(error)
                raise contradiction(f"{len(token_ids)} tokens do not follow it: {first_line(error)}")
        if self._grammar.numbers is not None:
            added = b"".join(map(self._grammar.numbers.bytes_of, token_ids[-_TAIL_BYTES:]))
            self._tail = (self._tail + added)[-_TAIL_BYTES:]

    def _begin_again(self) -> bool:
        """Copy a matcher with new states, and have it consume the output; return whether that was possible."""
        while self._num_renewals < MAX_RENEWALS:
            self._num_renewals += 1
            self._initial = self._grammar.renewed(self._initial)
            self._matcher = self._initial.deep_copy()
            if not self._tokens or self._matcher.consume_tokens(self._tokens):
                return True
            if _STATES_SIGN not in self._matcher.get_error():
                return False
        return False

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Compute which tokens may come next: [vocabulary] bool; see `allowed_bits`."""
        return np.unpackbits(self.allowed_bits(), count=self._grammar.vocab_size, bitorder="little").view(np.bool_)

    def allowed_bits(self) -> npt.NDArray[np.uint8]:
        """Compute which tokens may come next: [ceil(vocabulary / 8)] uint8, one bit per token, the lowest bit of a byte
        first. At the end of the grammar only the end-of-sequence tokens may.

        Raises:
            InvalidRequest: the grammar exceeds the limits of work for a step, or permits none of the vocabulary's
                tokens.
        """
        self._matcher.unsafe_compute_mask_ptr(self._address, self._num_bytes)
        while self._matcher.is_error():
            error = self._matcher.get_error()
            if _STATES_SIGN in error and self._begin_again():
                self._matcher.unsafe_compute_mask_ptr(self._address, self._num_bytes)
                continue
            raise dead_end() if _DEAD_END_SIGN in error else too_complex(error)
        if not self._words.any():
            raise dead_end()
        numbers = self._grammar.numbers
        return self._bits.copy() if numbers is None else self._bounded(numbers)

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
        copied = GrammarState(self._grammar, self._matcher)
        copied._initial, copied._num_renewals = self._initial, self._num_renewals
        copied._tokens, copied._tail = list(self._tokens), self._tail
        return copied

    @property
    def is_accepting(self) -> bool:
        """Whether the output so far is complete; it may be possible to extend it."""
        return self._matcher.is_accepting()


_DEAD_END_SIGN = "NoExtension"
_STATES_SIGN = "too many states"
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
