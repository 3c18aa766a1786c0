"""Masks of constrained sequences, computed while the step runs.

    engine    begin ───────────► prompt's steps ─► wait ─ sample ─ after ─► next step's kernels ─► wait ─ sample
    threads     └ compile, rebuild, mask ──┘                         └ advance, mask ──┘

A step that is launched ahead has the mask that `following` returned before the previous token was sampled. Most masks
take 10 us, which is less than waking a thread would cost the kernels. So the engine's thread computes a sequence's
masks while they are that fast, and other threads compute the masks of costly grammars.

A mask is usually ready long before the logits are. If it is not, the engine waits for at most `LATE_SECONDS`, and for
at most `LATE_SHARE` of all time: the sequence is then left out of steps until its mask is ready, so that costly
grammars do not delay other sequences. The state of a constraint depends only on the generated tokens, so any worker can
rebuild it from them.
"""

import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.constraint import Constraint
from kvferry.core.errors import KvferryError
from kvferry.core.histogram import Histogram
from kvferry.core.metrics import worker_metrics
from kvferry.engine.execute.grammar.wait_budget import LATE_SECONDS, LATE_SHARE, WaitBudget
from kvferry.engine.schedule.step.token_mask import Bits
from kvferry.text.grammar.compiler import GrammarCompiler
from kvferry.text.grammar.grammar import GrammarState, contradiction

INLINE_SECONDS = 0.0002
"""If a sequence's recent masks took less than this, its next mask is computed on the engine's thread."""
_DECAY = 0.9
"""Decay factor per token of the maximum duration of a sequence's masks."""
DRAFT_SECONDS = 0.0005
"""Time in seconds for which step planning waits for a mask that it needs to draft; a step without a draft costs
more."""
OFFLINE_SECONDS = 60.0
"""Time in seconds for which an engine without other callers waits for a mask."""
_NICENESS = 15
"""Niceness of the compiling threads, which have a lower priority than the kernels, since a compilation can take a
second."""


class GrammarMasks:
    """Creates the masks of one engine's sequences. Used on the engine's thread; masks are computed on others."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        *,
        clock: Clock | None = None,
        late_seconds: float = LATE_SECONDS,
        late_share: float = LATE_SHARE,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            compiler: compiles constraints.
            clock: measures masks.
            late_seconds: time for which a step waits for a mask.
            late_share: largest share of the time that steps wait for masks, from 0 to 1.
            notify: called on another thread when a mask becomes ready for which a step did not wait.
        """
        self._compiler = compiler
        self._clock = clock or SystemClock()
        self._waits = WaitBudget(late_seconds, late_share)
        self.compile_seconds = Histogram(worker_metrics.COMPILE_SECONDS.buckets)
        """Durations until the first mask of a sequence."""
        self.mask_seconds = Histogram(worker_metrics.MASK_SECONDS.buckets)
        """Durations of the other masks."""
        self.num_late = 0
        """Number of masks for which a step did not wait."""
        self._notify = notify
        self._ready = threading.Condition()
        count = max(1, (os.cpu_count() or 1) // 2)
        # Two pools, so that a long compilation does not delay the masks of running sequences.
        self._compiling = ThreadPoolExecutor(count, "grammar-compile", initializer=_lower_priority)
        self._masking = ThreadPoolExecutor(count, "grammar-mask")

    def begin(self, constraint: Constraint, generated: Sequence[int]) -> "GrammarMask":
        """Start computing the first mask of a sequence.

        Args:
            constraint: the constraint of its output.
            generated: tokens already generated, on this or another worker.
        """
        mask = GrammarMask(self)
        tokens = list(generated)

        def compute() -> GrammarState:
            state = self._compiler.compile(constraint).start()
            state.advance(tokens)
            return state

        self._compiling.submit(mask.compute, compute, self.compile_seconds)
        return mask

    def _wait_for(self, mask: "GrammarMask") -> None:
        begun = self._clock.monotonic()
        with self._ready:
            self._ready.wait_for(lambda: mask.is_ready or mask._is_abandoned, self._waits.available(begun))
            mask._is_late = not (mask.is_ready or mask._is_abandoned)
            self.num_late += mask._is_late
        self._waits.spend(self._clock.monotonic() - begun)


class GrammarMask:
    """Mask of the next token of one sequence; see `TokenMask`."""

    __slots__ = ("_allowed", "_error", "_following", "_is_abandoned", "_is_late", "_owner", "_recent_seconds", "_state")

    def __init__(self, owner: GrammarMasks) -> None:
        self._owner = owner
        self._state: GrammarState | None = None
        self._allowed: Bits | None = None
        self._error: KvferryError | None = None
        self._is_late = False
        self._is_abandoned = False
        self._recent_seconds = math.inf
        """Decaying maximum of the durations of this sequence's masks; infinite before the first."""
        self._following: GrammarMask | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the mask or its error is known."""
        return self._allowed is not None or self._error is not None

    def wait(self) -> Bits | None:
        """Return the mask; see `TokenMask.wait`.

        Raises:
            InvalidRequest: the constraint is invalid or too complex, or its mask could not be computed.
        """
        if not self.is_ready:
            self._owner._wait_for(self)
        if self._error is not None:
            raise self._error
        return self._allowed

    def after(self, token_ids: Sequence[int]) -> "GrammarMask":
        """Start computing the mask after `token_ids`."""
        following, state = self._following or GrammarMask(self._owner), self._state
        assert state is not None, "a token was sampled without its mask"
        tokens = list(token_ids)

        def advance() -> GrammarState:
            state.advance(tokens)
            return state

        following._recent_seconds = self._recent_seconds * _DECAY
        if self._recent_seconds < INLINE_SECONDS:
            following.compute(advance, self._owner.mask_seconds)
        else:
            self._owner._masking.submit(following.compute, advance, self._owner.mask_seconds)
        return following

    def following(self) -> "GrammarMask":
        """See `TokenMask.following`."""
        if self._following is None:
            self._following = GrammarMask(self._owner)
        return self._following

    def abandon(self) -> None:
        """See `TokenMask.abandon`."""
        following, self._following = self._following, None
        if following is not None:
            with self._owner._ready:
                following._is_abandoned = True
                self._owner._ready.notify_all()

    def forced_tokens(self) -> Sequence[int]:
        """See `TokenMask.forced_tokens`."""
        return self._state.forced_tokens() if self._wait_for_mask() and self._state is not None else ()

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """See `TokenMask.num_allowed`."""
        return self._state.num_allowed(token_ids) if self._wait_for_mask() and self._state is not None else 0

    def after_each(self, token_ids: Sequence[int]) -> "Sequence[GrammarMask]":
        """See `TokenMask.after_each`."""
        state = self._state
        assert state is not None, "a draft requires a mask that is already computed"
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

    def _wait_for_mask(self) -> bool:
        """Wait briefly for the mask; return whether it is known and has no error."""
        if not self.is_ready:
            with self._owner._ready:
                self._owner._ready.wait_for(lambda: self.is_ready, DRAFT_SECONDS)
        return self._allowed is not None

    def compute(self, reach: Callable[[], GrammarState], seconds: Histogram) -> None:
        """Compute the mask; on a thread of the pool.

        Args:
            reach: returns the grammar's state, whose allowed next tokens are the mask.
            seconds: receives the duration.
        """
        begun = self._owner._clock.monotonic()
        allowed: Bits | None = None
        error: KvferryError | None = None
        try:
            self._state = reach()
            allowed = self._state.allowed_bits()
        except KvferryError as caught:
            error = caught
        except Exception as caught:  # from the library: the sequence fails, and the engine continues
            error = contradiction(f"its mask could not be computed: {type(caught).__name__}")
        with self._owner._ready:
            duration = self._owner._clock.monotonic() - begun
            seconds.observe(duration)
            recent = self._recent_seconds
            self._recent_seconds = duration if math.isinf(recent) else max(duration, recent)
            self._allowed, self._error = allowed, error
            self._owner._ready.notify_all()
            is_late = self._is_late
        if is_late:
            self._owner._notify()


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
