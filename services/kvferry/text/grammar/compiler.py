"""Grammar compiler: compiles constraints for the vocabulary of a model, and caches the grammars."""

import functools
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest, shortened
from kvferry.core.process.memory import allocated_bytes
from kvferry.text.grammar.grammar import Grammar, Numbers, first_line, is_limit, too_complex
from kvferry.text.grammar.grammar_text import grammar_text
from kvferry.text.grammar.large_stack import call_with_stack
from kvferry.text.grammar.library_tokenizer import library_tokenizer, named_tokens
from kvferry.text.tokenizing.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

MAX_GRAMMAR_BYTES = 32 << 20
"""Maximum memory of a compiled grammar in bytes, without the states that outputs visit."""
MAX_CACHED, MAX_CACHED_BYTES = 128, 64 << 20
"""Limits of the cache of compiled grammars: their number, and their total memory without the visited states."""
MAX_STATES = 20_000
"""Maximum number of states that the outputs of a grammar visit before it is compiled again: 1 to 2 KiB each."""
MAX_GROWTH_BYTES = 256 << 20
"""Growth of the memory of native libraries, visited states included, at which the cache is emptied: grammars in use
live until their outputs end."""
STACK_BYTES, CHECK_STACK_BYTES = 256 << 20, 128 << 20
"""Sizes of the stack on which workers compile constraints, and of the smaller one on which they are checked before.
The longest chains of references for which a constraint has room take less than 64 MiB."""
_GROWTH_SECONDS = 1.0
"""Interval between measurements of that memory."""

_CHECKED_TOKENS = 16
_POSITION = re.compile(r"at (\d+)\(\d+\): ")
"""Line and column of an error in a grammar."""
_UNKNOWN_TOKEN = re.compile('unknown special token: "(<.*?>)";')
_BAD_ID = re.compile("Token range end too large|number too large to fit in target type")


class GrammarCompiler:
    """Compiles constraints for the vocabulary of a model. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        clock: Clock | None = None,
        allocated: Callable[[], int] = allocated_bytes,
        stack_bytes: int = STACK_BYTES,
    ) -> None:
        """
        Args:
            tokenizer: the model's tokenizer.
            clock: spaces the measurements of memory.
            allocated: returns the bytes that the process has allocated.
            stack_bytes: size of the stack on which constraints are compiled.
        """
        self._stack_bytes = stack_bytes
        self._tokenizer = tokenizer
        self._clock = clock or SystemClock()
        self._allocated = allocated
        self._lock = threading.Lock()
        self._library_tokenizer: LLTokenizer | None = None
        self._cache: OrderedDict[Constraint, tuple[Grammar, int]] = OrderedDict()
        """Grammars and their memory in bytes, the least recently used first."""
        self.cached_bytes = 0
        self._measured_at = -math.inf
        self._least_allocated: int | None = None

    @functools.cached_property
    def _numbers(self) -> Numbers:
        return Numbers(self._tokenizer)

    def check(self, constraint: Constraint) -> int:
        """Check that a constraint can be compiled, and that the masks of its first tokens can be computed, since the
        work per mask is limited too. Return its memory in bytes, exact if no other thread allocates meanwhile.

        Raises:
            InvalidRequest: see `compile`; the compiled constraint takes more than `MAX_GRAMMAR_BYTES`.
        """
        self._prepared()
        before = self._allocated()
        grammar = self._compile(constraint)  # not kept: the process that checks runs no outputs
        size = self._allocated() - before
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"the constraint takes {size / 2**20:.0f} MiB of memory when it is compiled; at most "
                f"{MAX_GRAMMAR_BYTES >> 20} MiB are accepted; simplify it",
                field="constraint",
                reason="CONSTRAINT_TOO_COSTLY",
            )
        state = grammar.start()
        for _ in range(_CHECKED_TOKENS):
            token = int(state.allowed().argmax())
            if token in self._tokenizer.eos_token_ids:
                break
            state.advance([token])
        return max(size, _size(constraint))

    def compile(self, constraint: Constraint) -> Grammar:
        """Compile a constraint, or return its grammar from the cache. Most schemas take a few milliseconds; the first
        call also prepares the vocabulary, which takes half a second.

        Raises:
            InvalidRequest: the constraint is invalid, uses an unsupported feature, or is too complex.
        """
        with self._lock:
            self._limit_growth()
            known = self._cache.get(constraint)
            if known is not None:
                self._cache.move_to_end(constraint)
                return known[0]
        self._prepared()
        before = self._allocated()
        made = self._compile(constraint)
        measured = min(max(self._allocated() - before, 0), MAX_GRAMMAR_BYTES)  # other threads allocate as well
        size = max(constraint.cost_bytes or measured, _size(constraint))
        with self._lock:
            if constraint not in self._cache:
                self._cache[constraint] = made, size
                self.cached_bytes += size
            while len(self._cache) > MAX_CACHED or (self.cached_bytes > MAX_CACHED_BYTES and len(self._cache) > 1):
                _, (_, freed) = self._cache.popitem(last=False)
                self.cached_bytes -= freed
        return made

    def _limit_growth(self) -> None:
        """Empty the cache if memory has grown too much. If it was not the grammars' memory, growth is measured from
        what remains."""
        now = self._clock.monotonic()
        if now - self._measured_at < _GROWTH_SECONDS:
            return
        self._measured_at = now
        allocated = self._allocated()
        if self._least_allocated is None:
            self._least_allocated = allocated
        self._least_allocated = min(self._least_allocated, allocated)
        if allocated - self._least_allocated > MAX_GROWTH_BYTES:
            self._cache.clear()
            self.cached_bytes = 0
            self._least_allocated = self._allocated()

    def _compile(self, constraint: Constraint) -> Grammar:
        from llguidance import LLMatcher

        text = grammar_text(constraint, named_tokens(self._tokenizer))
        prepared = self._prepared()

        def make() -> LLMatcher:
            # The library recurses as deep as references are chained.
            matcher = call_with_stack(
                self._stack_bytes, lambda: LLMatcher(prepared, text, log_level=0, limits=_limits())
            )
            if not matcher.is_error():
                return matcher
            error = matcher.get_error()
            if is_limit(error) and not _BAD_ID.search(error):
                raise too_complex(error)
            raise InvalidRequest(
                f"{constraint.kind} cannot be used: {_explained(error, constraint, self._tokenizer)}",
                field="constraint",
                reason="CONSTRAINT_INVALID",
            )

        # A pattern says how many digits there are.
        numbers = None if constraint.kind is ConstraintKind.REGEX else self._numbers
        return Grammar(make, self._tokenizer.vocab_size, numbers)

    def _prepared(self) -> "LLTokenizer":
        with self._lock:
            if self._library_tokenizer is None:
                tokenizer = self._tokenizer
                if not tokenizer.eos_token_ids:
                    raise InvalidRequest(
                        "constrained outputs need a model with an end-of-sequence token; this model has none",
                        field="constraint",
                    )
                try:
                    self._library_tokenizer = library_tokenizer(tokenizer)
                except Exception as error:  # the library raises several types for tokenizers that it cannot read
                    raise InvalidRequest(
                        f"constrained outputs are not available with this model's tokenizer: {first_line(str(error))}",
                        field="constraint",
                    ) from None
            return self._library_tokenizer


def _size(constraint: Constraint) -> int:
    return len(constraint.source) + len(constraint.frame)


def _explained(error: str, constraint: Constraint, tokenizer: Tokenizer) -> str:
    """Return the parser's error, with kvferry's own remedy where the parser names one that a request cannot use, and
    with the name of the grammar's rule."""
    if unknown := _UNKNOWN_TOKEN.search(error):
        names = ", ".join(tokenizer.control_tokens)
        return f"{shortened(unknown[1])} is not a control token of the model; its control tokens are {shortened(names)}"
    if _BAD_ID.search(error):
        return f"a token id is too large: the ids of the vocabulary are 0 to {tokenizer.vocab_size - 1}"
    if "are not disjoint" in error:
        return (
            "allOf combines objects that allow members besides those in `properties`, which cannot be enforced; list "
            "all members in one object"
        )
    if "coerce_one_of" in error:
        return "oneOf needs mutually exclusive alternatives, for example of different types or constants; use anyOf"
    found = _POSITION.match(error) if constraint.frame or constraint.kind is ConstraintKind.GRAMMAR else None
    lines = (constraint.frame or constraint.source).split("\n")
    if found is None or int(found[1]) > len(lines):
        return first_line(error)
    rule = lines[int(found[1]) - 1].partition(":")[0].strip()
    return f"{first_line(error)} (rule {shortened(rule)})"


def _limits() -> "LLParserLimits":
    """Return the limits of the parser's work, in the library's units. They do not depend on the machine's speed, so a
    constraint is accepted or rejected alike everywhere; a token takes less than 50 ms."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        max_grammar_size=200_000,
        max_lexer_states=MAX_STATES,
        max_items_in_row=2_000,
        step_lexer_fuel=100_000,  # about 7 ms
        step_max_items=20_000,  # about 20 ms
        verbose_errors=False,
    )
