"""Sequence state: tokens, progress counters C and N, and the state machine of the scheduler.

Progress consists of two numbers, 0 <= C <= N: C = `num_computed` is the number of tokens whose KV is stored, N =
`num_tokens` the number of all tokens, prompt and output. A step computes 0 < d <= N - C tokens, then C += d; a token is
sampled only when C reaches N, and then N += 1; a step that verifies draft tokens adds the number of accepted tokens to
both. Prefill, chunked prefill, decode, a prefix hit (start with C > 0), preemption (C back to 0, N kept) and the decode
side of a hand-off (start with C = prompt, N = prompt + 1) are all changes of these two numbers (Kwon, "vLLM: an
efficient inference engine for large language models", dissertation 2025, section 4.4).
"""

from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.core.errors import InvariantBroken
from kvferry.core.hashing import BlockNamer
from kvferry.core.ids import AdapterId, BlockHash, RequestId
from kvferry.core.sampling import FinishReason, SampledToken, SamplingParams, ScoredToken
from kvferry.core.states import Machine
from kvferry.engine.schedule.blocks.block_table import BlockTable
from kvferry.engine.schedule.blocks.cached_prefix import CachedPrefix
from kvferry.engine.schedule.step.adapter_slots import NO_SLOT
from kvferry.engine.schedule.step.prompt_pooling import PromptPooling
from kvferry.engine.schedule.step.token_mask import TokenMask


class SequenceState(StrEnum):
    """Scheduler state of a sequence."""

    WAITING = "waiting"
    """The sequence waits for admission and holds no pages."""
    LOADING = "loading"
    """The sequence waits for a load and holds the pages that a loader is filling."""
    RUNNING = "running"
    """The sequence takes part in steps and holds pages."""
    FINISHED = "finished"
    """The sequence has ended and holds no pages (they may have passed to an offer)."""


class SequenceEvent(StrEnum):
    """Event in a sequence's state machine."""

    ADMIT = "admit"
    LOAD = "load"
    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    PREEMPT = "preempt"
    FINISH = "finish"
    ABORT = "abort"


SEQUENCE_MACHINE = Machine(
    name="sequence",
    initial=SequenceState.WAITING,
    final=frozenset({SequenceState.FINISHED}),
    table={
        (SequenceState.WAITING, SequenceEvent.ADMIT): SequenceState.RUNNING,
        (SequenceState.WAITING, SequenceEvent.LOAD): SequenceState.LOADING,
        (SequenceState.WAITING, SequenceEvent.ABORT): SequenceState.FINISHED,
        (SequenceState.LOADING, SequenceEvent.LOADED): SequenceState.RUNNING,
        (SequenceState.LOADING, SequenceEvent.LOAD_FAILED): SequenceState.WAITING,
        (SequenceState.LOADING, SequenceEvent.ABORT): SequenceState.FINISHED,
        (SequenceState.RUNNING, SequenceEvent.PREEMPT): SequenceState.WAITING,
        (SequenceState.RUNNING, SequenceEvent.FINISH): SequenceState.FINISHED,
        (SequenceState.RUNNING, SequenceEvent.ABORT): SequenceState.FINISHED,
    },
)


@dataclass(frozen=True, slots=True)
class RemoteKv:
    """KV of a prefix of a sequence at a peer or in a tier. The scheduler reads only its token range."""

    num_tokens: int
    """Positions first_token .. num_tokens-1 can be loaded."""
    source: object
    """Input of the loader: an opened ticket, or keys of storage objects."""
    label: str = "peer"
    """Kind of the source, for reports and cost estimates."""
    place: str = ""
    """Instance of the source, such as a peer's worker id; costs are estimated separately for each instance."""
    first_token: int = 0
    """First position that can be loaded; earlier positions were in the prefix cache at the time of the lookup."""
    has_all_pages: bool = False
    """Whether the source has the pages of all layer groups for every block, as tiers do, instead of only the pages that
    later rows read."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence in the engine. Owned by the scheduler."""

    request_id: RequestId
    tokens: list[int]
    """Token ids: prompt, then generated tokens."""
    num_prompt: int
    sampling: SamplingParams
    namer: BlockNamer
    max_tokens_total: int
    """Limit on N: the smaller of the context length and the number of prompt tokens plus max_tokens."""
    eos_token_ids: frozenset[int]
    arrival: int = 0
    """Order of arrival: the earliest is scheduled first, the latest is preempted first."""
    sample_index: int = 0
    priority: int = 0
    """Priority of the request; lower numbers come first, in policies that compare priorities."""
    latest_start: float | None = None
    """Time after which the deadline can no longer be met, monotonic seconds; a sequence that waits longer is
    refused. `None` without a deadline."""
    scope: str = ""
    adapter: AdapterId | None = None
    adapter_slot: int = NO_SLOT
    """Slot of the adapter while the sequence is admitted."""
    num_overtaken: int = 0
    """Number of later sequences with adapters that were admitted while this one waited for a slot."""
    exports: bool = False
    """Whether to stop after one token and export the pages (on a prefill worker)."""
    keeps: bool = False
    """Whether to report the pages of the full blocks at the end, so that peers can read them while they are cached."""
    remote: RemoteKv | None = None
    is_lookup_pending: bool = False
    """Whether a tier lookup is pending; admission skips the sequence until it completes."""
    state: SequenceState = SEQUENCE_MACHINE.initial
    num_computed: int = 0
    table: BlockTable = field(default_factory=BlockTable)
    names: list[BlockHash] = field(default_factory=list)
    """Names of the full blocks hashed so far; a prefix of the hash chain."""
    last_lookup: tuple[int, int, CachedPrefix] | None = None
    """Last lookup in the prefix cache: version of the cache, maximum number of tokens, and result; `None` if
    there is none."""
    num_listed: int = 0
    """Number of leading blocks that are in the prefix index."""
    num_stored: int = 0
    """Number of leading blocks that were stored in the tiers or loaded from them."""
    num_reported: int = 0
    """Number of leading blocks that were reported as `Progress`."""
    num_cached: int = 0
    """Number of tokens found in the prefix cache at the first admission."""
    num_scored: int = 0
    """Number of leading positions whose rows were scored; kept when the sequence is preempted."""
    scores: list[ScoredToken] = field(default_factory=list)
    """Scored tokens of the prompt that have not been reported."""
    has_told_scores: bool = False
    pooling: PromptPooling | None = None
    """Pooled vector of a pooling request, which samples no tokens; `None` for other requests."""
    num_preemptions: int = 0
    mask: TokenMask | None = None
    """Mask of the next token, if the sequence has a constraint."""
    is_postponed: bool = False
    """Whether the last step sampled no token because the mask was not ready; the sequence takes part in steps again
    once the mask is ready."""
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """N: tokens so far, prompt and output."""
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        """Number of generated tokens, including those generated by other workers."""
        return len(self.tokens) - self.num_prompt

    @property
    def is_scoring(self) -> bool:
        """Whether rows of the prompt remain to be scored."""
        return self.sampling.prompt_logprobs is not None and self.num_scored < self.num_prompt - 1

    @property
    def num_reusable(self) -> int:
        """Maximum number of leading tokens whose KV may be taken from a cache: all but the last one, and only tokens
        whose rows need not be scored or pooled."""
        if self.pooling is not None:
            return self.pooling.num_reusable
        return self.num_scored if self.is_scoring else self.num_tokens - 1

    @property
    def may_load(self) -> bool:
        """Whether KV of peers and tiers can be loaded; the rows of loaded KV have neither logits nor hidden states."""
        return not self.is_scoring if self.pooling is None else self.pooling.may_load

    def scored_in(self, start: int, count: int) -> int:
        """Return how many rows are scored if the tokens `start` .. `start` + `count` - 1 are computed."""
        if not self.is_scoring:
            return 0
        return max(0, min(start + count, self.num_prompt - 1) - max(start, self.num_scored))

    def add_scores(self, scores: tuple[ScoredToken, ...], count: int) -> None:
        """Record the scored tokens of a step that had `count` scored rows.

        Args:
            scores: the scored tokens, in order of position.
            count: number of scored rows in the step.

        Raises:
            InvariantBroken: the number of tokens and the number of rows differ.
        """
        if len(scores) != count:
            raise InvariantBroken(f"request {self.request_id}: {len(scores)} tokens were scored in {count} rows")
        self.num_scored += count
        self.scores += scores

    def take_scores(self) -> tuple[ScoredToken, ...] | None:
        """Return the scored tokens of the prompt, once, when all are known; `None` if they were not requested."""
        if self.sampling.prompt_logprobs is None or self.has_told_scores:
            return None
        self.has_told_scores = True
        scores, self.scores = tuple(self.scores), []
        return scores

    def move(self, event: SequenceEvent) -> None:
        """Apply a state transition.

        Raises:
            InvariantBroken: the event is not allowed in the current state.
        """
        self.state = SEQUENCE_MACHINE.next(self.state, event)
        if self.mask is not None:
            self.mask.abandon()

    def name_blocks(self) -> list[BlockHash]:
        """Return the names of all full blocks of the current tokens; only new blocks are hashed."""
        size = self.namer.block_tokens
        while (len(self.names) + 1) * size <= len(self.tokens):
            start = len(self.names) * size
            parent = self.names[-1] if self.names else None
            self.names.append(self.namer.name(parent, self.tokens[start : start + size]))
        return self.names

    def postpone(self) -> None:
        """Record that the last step sampled no token because the mask was not ready."""
        self.is_postponed = True
        if self.mask is not None:
            self.mask.abandon()

    @property
    def waits_for_mask(self) -> bool:
        """Whether the sequence takes no part in steps until its mask is ready."""
        return self.is_postponed and self.mask is not None and not self.mask.is_ready

    def banned_now(self) -> tuple[int, ...]:
        """Return the token ids banned for the next token: the end tokens, until `min_tokens` were generated."""
        return self.banned_after(0)

    def banned_after(self, count: int) -> tuple[int, ...]:
        """Return the token ids banned after `count` more tokens; see `banned_now`."""
        least = self.sampling.min_tokens
        if least == 0 or self.num_generated + count >= least:
            return ()
        return (*sorted(self.eos_token_ids), *self.sampling.stop_token_ids)

    def extend(self, drawn: tuple[SampledToken, ...]) -> tuple[tuple[SampledToken, ...], FinishReason | None]:
        """Append sampled tokens, up to and including the one that ends the sequence; return these tokens and the finish
        reason."""
        if len(drawn) == 1:  # the most frequent case
            return drawn, self.append(drawn[0].token_id)
        for index, token in enumerate(drawn):
            reason = self.append(token.token_id)
            if reason is not None:
                return drawn[: index + 1], reason
        return drawn, None

    def append(self, token_id: int) -> FinishReason | None:
        """Append a sampled token; return the finish reason, or `None` if the sequence continues.

        Stop conditions, in order: end of sequence or a stop token id (the token stays in the output), then length.
        Stop strings are matched on detokenized text, outside the engine.
        """
        self.tokens.append(token_id)
        if token_id in self.sampling.stop_token_ids:
            return FinishReason.STOP
        if token_id in self.eos_token_ids and (self.sampling.constraint is not None or not self.sampling.ignore_eos):
            return FinishReason.STOP
        if self.num_tokens >= self.max_tokens_total:
            return FinishReason.LENGTH
        return None
