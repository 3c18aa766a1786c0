"""One sequence: its tokens, its two counters, its state.

Progress is two numbers and nothing else: C = `num_computed`, tokens whose KV is stored, and N = `num_tokens`,
prompt and output together, 0 <= C <= N. A step computes 0 < d <= N - C tokens, then C += d; a token is drawn
only when C reaches N, and then N += 1. Prefill, chunked prefill, decode, a prefix hit (start with C > 0),
preemption (C back to 0, N kept) and the decode side of a hand-off (start with C = prompt, N = prompt + 1)
are all moves of these two (Kwon, "vLLM: an efficient inference engine for large language models",
dissertation 2025, section 4.4).
"""

from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.core.hashing import BlockNamer
from kvferry.core.ids import BlockHash, RequestId
from kvferry.core.sampling import FinishReason, SamplingParams
from kvferry.core.states import Machine
from kvferry.engine.allocation import BlockTable


class SequenceState(StrEnum):
    """Where a sequence stands with the scheduler."""

    WAITING = "waiting"
    """Holds no pages."""
    LOADING = "loading"
    """Holds pages that a connector is filling."""
    RUNNING = "running"
    """Holds pages; takes part in steps."""
    FINISHED = "finished"
    """Holds no pages (an offer may have taken them over)."""


class SequenceEvent(StrEnum):
    """What can happen to a sequence."""

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
    """KV for the head of this sequence that is somewhere else; opaque to the scheduler but for its extent."""

    num_tokens: int
    """Positions first_token .. num_tokens-1 can be loaded."""
    source: object
    """What the loader needs (an opened ticket, the keys of storage objects)."""
    label: str = "peer"
    """What kind of place it is in, for reports."""
    place: str = ""
    """Which of its kind: each peer has prices of its own."""
    first_token: int = 0
    """Positions before this cannot be loaded: they were in the local cache when the source was asked."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence in the engine. Owned by the scheduler."""

    request_id: RequestId
    tokens: list[int]
    """Prompt, then generated."""
    num_prompt: int
    sampling: SamplingParams
    namer: BlockNamer
    max_tokens_total: int
    """N may grow to this: the smaller of the context and prompt + max_tokens."""
    eos_token_ids: frozenset[int]
    arrival: int = 0
    """Order of arrival; earlier goes first, later is preempted first."""
    sample_index: int = 0
    tenant: str = ""
    exports: bool = False
    """Stop after one token and hand the pages over (a prefill worker)."""
    keeps: bool = False
    """Say at the end where the full blocks are, so that they can be read for as long as they last."""
    remote: RemoteKv | None = None
    is_asking: bool = False
    """The tiers have not said yet what they have; others may pass while it waits for that."""
    state: SequenceState = SEQUENCE_MACHINE.initial
    num_computed: int = 0
    table: BlockTable = field(default_factory=BlockTable)
    names: list[BlockHash] = field(default_factory=list)
    """Names of the full blocks named so far; a prefix of the chain."""
    num_listed: int = 0
    """Leading blocks that are in the prefix index."""
    num_stored: int = 0
    """Leading blocks that were given to the tiers, or came from there."""
    num_told: int = 0
    """Leading blocks that a follower was told of."""
    num_cached: int = 0
    """Tokens found in the local prefix cache at the first admission."""
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        """Tokens that were drawn, here or by a worker before."""
        return len(self.tokens) - self.num_prompt

    def move(self, event: SequenceEvent) -> None:
        """Follow the table.

        Raises:
            InvariantBroken: the table has no such transition.
        """
        self.state = SEQUENCE_MACHINE.next(self.state, event)

    def name_blocks(self) -> list[BlockHash]:
        """Names of all full blocks of the tokens so far, extending what was named before."""
        size = self.namer.block_tokens
        while (len(self.names) + 1) * size <= len(self.tokens):
            start = len(self.names) * size
            parent = self.names[-1] if self.names else None
            self.names.append(self.namer.name(parent, self.tokens[start : start + size]))
        return self.names

    def banned_now(self) -> tuple[int, ...]:
        """Token ids that must not be drawn next: the end tokens, until `min_tokens` are out."""
        return self.banned_after(0)

    def banned_after(self, count: int) -> tuple[int, ...]:
        """The same once so many tokens more are drawn."""
        if self.num_generated + count >= self.sampling.min_tokens:
            return ()
        return (*sorted(self.eos_token_ids), *self.sampling.stop_token_ids)

    def append(self, token_id: int) -> FinishReason | None:
        """Add a drawn token; why the sequence ends with it, or `None`.

        Stop conditions, in order: end of sequence or a stop token id (the token stays in the output), then
        length. Stop strings are matched where text is made, outside the engine.
        """
        self.tokens.append(token_id)
        if token_id in self.sampling.stop_token_ids:
            return FinishReason.STOP
        if token_id in self.eos_token_ids and not self.sampling.ignore_eos:
            return FinishReason.STOP
        if self.num_tokens >= self.max_tokens_total:
            return FinishReason.LENGTH
        return None
