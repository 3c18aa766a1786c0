"""Masks of constrained sequences, computed on threads while the step runs.

    engine    begin ───────────► prompt's steps ─► wait ─ sample ─ after ─► next step's kernels ─► wait ─ sample
    threads     └ compile, rebuild, mask ──┘                         └ advance, mask ──┘

A mask is usually ready long before the logits are. If it is not, the engine waits for at most `LATE_SECONDS`: the
sequence is then left out of steps until its mask is ready, so that one costly grammar does not delay other sequences.
The state of a constraint depends only on the generated tokens, so any worker rebuilds it from them.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from kvferry.core import metrics
from kvferry.core.clock import Clock, SystemClock
from kvferry.core.constraint import Constraint
from kvferry.core.errors import GenerationFailed, KvferryError
from kvferry.core.histogram import Histogram
from kvferry.model.grammar.grammar import GrammarState
from kvferry.model.grammar.vocabulary import GrammarVocabulary

LATE_SECONDS = 0.002
"""Time that a step waits for a mask. A mask takes 0.05 ms on average, and is computed while the step's kernels run."""
DRAFT_SECONDS = 0.0005
"""Time that the plan of a step waits for a mask to make a draft; a step without a draft costs more than that."""
OFFLINE_SECONDS = 60.0
"""Time that an engine without other callers waits for a mask."""
_NICENESS = 10
"""Niceness of the threads that compile: below that of the kernels, since a compilation can take a second."""


class GrammarMasks:
    """Creates the masks of one engine's sequences. Used on the engine's thread; masks are computed on others."""

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        *,
        clock: Clock | None = None,
        late_seconds: float = LATE_SECONDS,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            vocabulary: compiles constraints.
            clock: measures masks.
            late_seconds: time that a step waits for a mask.
            notify: called on another thread when a mask becomes ready for which a step did not wait.
        """
        self._vocabulary = vocabulary
        self._clock = clock or SystemClock()
        self._late_seconds = late_seconds
        self.compile_seconds = Histogram(metrics.WORKER_COMPILE_SECONDS.buckets)
        """Durations until the first mask of a sequence."""
        self.mask_seconds = Histogram(metrics.WORKER_MASK_SECONDS.buckets)
        """Durations of the other masks."""
        self.num_late = 0
        """Number of masks for which a step did not wait."""
        self._notify = notify
        self._ready = threading.Condition()
        count = max(1, (os.cpu_count() or 1) // 2)
        # Two pools, such that a long compilation does not delay the masks of running sequences.
        self._compiling = ThreadPoolExecutor(count, "grammar-compile", initializer=_lower_priority)
        self._masking = ThreadPoolExecutor(count, "grammar-mask")

    def begin(self, constraint: Constraint, generated: Sequence[int]) -> "GrammarMask":
        """Start to compute the first mask of a sequence.

        Args:
            constraint: the constraint of its output.
            generated: tokens that were generated already, on this worker or another one.
        """
        mask = GrammarMask(self)
        tokens = list(generated)

        def compute() -> GrammarState:
            state = self._vocabulary.compile(constraint).start()
            state.advance(tokens)
            return state

        self._compiling.submit(mask.compute, compute, self.compile_seconds)
        return mask


class GrammarMask:
    """Mask of the next token of one sequence; see `TokenMask`."""

    __slots__ = ("_allowed", "_error", "_is_late", "_owner", "_state")

    def __init__(self, owner: GrammarMasks) -> None:
        self._owner = owner
        self._state: GrammarState | None = None
        self._allowed: npt.NDArray[np.bool_] | None = None
        self._error: KvferryError | None = None
        self._is_late = False

    @property
    def is_ready(self) -> bool:
        """Whether the mask or its error is known."""
        return self._allowed is not None or self._error is not None

    def wait(self) -> npt.NDArray[np.bool_] | None:
        """Return the mask; see `TokenMask.wait`.

        Raises:
            InvalidRequest: the constraint is invalid or too complex.
            GenerationFailed: the mask could not be computed.
        """
        if not self.is_ready:
            with self._owner._ready:
                self._owner._ready.wait_for(lambda: self.is_ready, self._owner._late_seconds)
                self._is_late = not self.is_ready
                self._owner.num_late += self._is_late
        if self._error is not None:
            raise self._error
        return self._allowed

    def after(self, token_ids: Sequence[int]) -> "GrammarMask":
        """Start to compute the mask after `token_ids`."""
        following, state = GrammarMask(self._owner), self._state
        assert state is not None, "a token was sampled without its mask"
        tokens = list(token_ids)

        def advance() -> GrammarState:
            state.advance(tokens)
            return state

        self._owner._masking.submit(following.compute, advance, self._owner.mask_seconds)
        return following

    def forced_tokens(self) -> Sequence[int]:
        """See `TokenMask.forced_tokens`."""
        return self._state.forced_tokens() if self._has_state() and self._state is not None else ()

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """See `TokenMask.num_allowed`."""
        return self._state.num_allowed(token_ids) if self._has_state() and self._state is not None else 0

    def after_each(self, token_ids: Sequence[int]) -> "Sequence[GrammarMask]":
        """See `TokenMask.after_each`."""
        state = self._state
        assert state is not None, "drafts follow a mask that is ready"
        masks = [GrammarMask(self._owner) for _ in token_ids]

        def compute_all() -> None:
            own = state.copy()  # on the thread, since a copy takes as long as a mask
            for mask, token in zip(masks, token_ids, strict=True):

                def advance(token: int = token) -> GrammarState:
                    own.advance([token])
                    return own

                mask.compute(advance, self._owner.mask_seconds)

        self._owner._masking.submit(compute_all)
        return masks

    def _has_state(self) -> bool:
        """Wait briefly for the mask; return whether it is known and has no error."""
        if not self.is_ready:
            with self._owner._ready:
                self._owner._ready.wait_for(lambda: self.is_ready, DRAFT_SECONDS)
        return self._allowed is not None

    def compute(self, reach: Callable[[], GrammarState], seconds: Histogram) -> None:
        """Compute the mask; on a thread of the pool.

        Args:
            reach: returns the state whose next tokens are allowed.
            seconds: receives the duration.
        """
        begun = self._owner._clock.monotonic()
        allowed: npt.NDArray[np.bool_] | None = None
        error: KvferryError | None = None
        try:
            self._state = reach()
            allowed = self._state.allowed()
        except KvferryError as caught:
            error = caught
        except Exception as caught:  # of the library: the sequence fails, the engine continues
            error = GenerationFailed(f"the mask of a constrained output could not be computed: {type(caught).__name__}")
        with self._owner._ready:
            seconds.observe(self._owner._clock.monotonic() - begun)
            self._allowed, self._error = allowed, error
            self._owner._ready.notify_all()
            is_late = self._is_late
        if is_late:
            self._owner._notify()


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
