"""Sequences: the state machine of the scheduler, over three values that each have their own module.

    request    what to generate; never changes                 (`sequence_request`)
    kv         pages, and how far their KV has come            (`kv_progress`)
    sampling   tokens, masks, scored and pooled prompt rows    (`sampling_state`)

Attributes are assigned only in the module of their class; other modules call its methods.

Progress consists of two numbers, 0 <= C <= N: C = `num_computed` is the number of tokens whose KV is stored, N =
`num_tokens` the number of all tokens, prompt and output. A step computes 0 < d <= N - C tokens, then C += d; a token is
sampled only when C reaches N, and then N += 1; a step that verifies draft tokens adds the number of accepted tokens to
both. Prefill, chunked prefill, decode, a prefix hit (start with C > 0), preemption (C back to 0, N kept) and the decode
side of a hand-off (start with C = prompt, N = prompt + 1) are all changes of these two numbers (Kwon, "vLLM: an
efficient inference engine for large language models", dissertation 2025, section 4.4).
"""

from dataclasses import replace
from enum import StrEnum

from kvferry.core.hashing import BlockNamer
from kvferry.core.ids import BlockHash
from kvferry.core.states import Machine
from kvferry.engine.schedule.step.adapter_slots import NO_SLOT
from kvferry.engine.schedule.step.kv_account import KvAccount
from kvferry.engine.schedule.step.kv_progress import KvProgress, RemoteKv
from kvferry.engine.schedule.step.prompt_pooling import PromptPooling
from kvferry.engine.schedule.step.sampling_state import SamplingState
from kvferry.engine.schedule.step.sequence_request import SequenceRequest
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


class Sequence:
    """One sequence in the engine. Owned by the scheduler."""

    __slots__ = (
        "adapter_slot", "arrival", "kv", "num_overtaken", "num_preemptions", "request", "request_id", "sampling",
        "state",
    )  # fmt: skip

    def __init__(
        self, request: SequenceRequest, tokens: list[int], *, arrival: int = 0, names: list[BlockHash] | None = None,
        remote: RemoteKv | None = None, mask: TokenMask | None = None, pooling: PromptPooling | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            request: what to generate.
            tokens: the prompt, then tokens that other workers have generated.
            arrival: see `arrive`.
            names: names of the first full blocks, if they are known.
            remote: KV that can be loaded.
            mask: mask of the next token, if the request has a constraint.
            pooling: the pooled vector, if the request asks for one.
        """
        self.request = request
        self.request_id = request.request_id
        self.sampling = SamplingState(request, tokens, mask, pooling)
        self.kv = KvProgress(remote, [] if names is None else names, KvAccount(request.num_prompt, len(tokens)))
        self.state = SEQUENCE_MACHINE.initial
        self.arrival = arrival
        """Order of arrival: the earliest is scheduled first, the latest is preempted first."""
        self.adapter_slot = NO_SLOT
        """Slot of the adapter while the sequence is admitted."""
        self.num_overtaken = 0
        """Number of later sequences with adapters that were admitted while this one waited for a slot."""
        self.num_preemptions = 0

    @property
    def num_tokens(self) -> int:
        """N: tokens so far, prompt and output."""
        return len(self.sampling.tokens)

    @property
    def num_uncomputed(self) -> int:
        """N - C: tokens whose KV is not in the pages."""
        return len(self.sampling.tokens) - self.kv.num_computed

    def name_blocks(self) -> list[BlockHash]:
        """Return the names of all full blocks of the current tokens; only new blocks are hashed."""
        return self.kv.name_blocks(self.request.namer, self.sampling.tokens)

    def rename(self, namer: BlockNamer) -> None:
        """Name the blocks with another namer from now on, because the model's weights changed."""
        self.request = replace(self.request, namer=namer)
        self.kv.forget_names()
        self.name_blocks()

    def move(self, event: SequenceEvent) -> None:
        """Apply a state transition.

        Raises:
            InvariantBroken: the event is not allowed in the current state.
        """
        self.state = SEQUENCE_MACHINE.next(self.state, event)
        if event is SequenceEvent.PREEMPT:
            self.num_preemptions += 1
        self.sampling.abandon_mask()

    def arrive(self, number: int) -> None:
        """Record the order of arrival."""
        self.arrival = number

    def take_slot(self, slot: int) -> None:
        """Record the slot of the adapter with which the sequence is admitted."""
        self.adapter_slot, self.num_overtaken = slot, 0

    def give_back_slot(self) -> None:
        """Record that the sequence has no adapter slot."""
        self.adapter_slot = NO_SLOT

    def overtaken(self) -> None:
        """Record that a later sequence with an adapter was admitted while this one waited for a slot."""
        self.num_overtaken += 1
