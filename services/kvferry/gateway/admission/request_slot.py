"""The slot of a request at the gateway: the slots of its samples, and the tokens that it uses."""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Protocol

from kvferry.gateway.decide.flow.fair_queue import QueueEntry
from kvferry.serving.admission import RequestSize
from kvferry.serving.request import Caller


class SlotGate(Protocol):
    """What admits and ends the requests and samples of slots; see `flow_gate.FlowGate`."""

    async def admit(self, slot: "RequestSlot") -> None:
        """Wait until the request is dispatched."""
        ...

    def leave(self, slot: "RequestSlot", *, is_whole: bool) -> None:
        """End the request."""
        ...

    async def enter_sample(self, slot: "RequestSlot", sample: int, *, is_prompt_new: bool) -> QueueEntry:
        """Wait until a further sample is dispatched."""
        ...

    def leave_sample(self, slot: "RequestSlot", entry: QueueEntry) -> None:
        """End a sample."""
        ...

    def prefilled(self, entry: QueueEntry, num_tokens: int) -> None:
        """Note that a prompt was computed."""
        ...

    def now(self) -> float:
        """Return the monotonic time in seconds."""
        ...


class _Sample:
    """Tokens of one sample; `cached` is -1 until the sample has ended."""

    __slots__ = ("cached", "output")

    def __init__(self) -> None:
        self.output = 0
        self.cached = -1


class RequestSlot:
    """Implements `serving.admission.Slot`."""

    __slots__ = (
        "_entries", "_gate", "_samples", "_turn", "charged_parts", "entered", "entry", "expected_tokens",
        "handed_out_at", "priority", "queued_seconds", "recomputed_tokens", "waiting", "work",
    )  # fmt: skip

    def __init__(self, gate: SlotGate, work: RequestSize) -> None:
        self._gate = gate
        self._samples: dict[int, _Sample] = {}
        self._entries: dict[int, QueueEntry] = {}
        """Entries by sample, if the request has several."""
        self._turn: asyncio.Lock | None = None
        """Held by the sample that waits for a slot."""
        self.waiting: QueueEntry | None = None
        """The entry of that sample."""
        self.charged_parts = 0.0
        """Tokens charged for further samples."""
        self.handed_out_at: float | None = None
        """Time since which a part of the output waits for its reader, monotonic seconds; `None` if none does."""
        self.work = work
        self.queued_seconds = 0.0
        self.priority = work.caller.priority
        self.entry: QueueEntry | None = None
        """The request in the flow controller; `None` before it is entered."""
        self.expected_tokens = 0.0
        """Tokens charged to the tenant's quota: prompt and output."""
        self.recomputed_tokens = 0
        """Tokens of beams whose KV was computed again."""
        self.entered = 0.0
        """Time of the admission, monotonic seconds."""

    def admitted(self, caller: Caller) -> Caller:
        """See `serving.admission.Slot.admitted`."""
        if not self.queued_seconds and self.priority == caller.priority:
            return caller
        return replace(caller, queued_seconds=self.queued_seconds, priority=self.priority)

    async def __aenter__(self) -> "RequestSlot":
        await self._gate.admit(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate.leave(self, is_whole=kind is None)

    @asynccontextmanager
    async def sample_slot(self, sample: int) -> AsyncIterator[None]:
        """See `serving.admission.Slot.sample_slot`."""
        assert self.entry is not None, "a sample began before its request was admitted"
        if not self._entries:
            entry = self.entry
        else:
            self._turn = self._turn or asyncio.Lock()
            async with self._turn:
                entry = await self._gate.enter_sample(self, sample, is_prompt_new=self._is_prompt_new(sample))
        self._entries[sample] = entry
        try:
            yield
        finally:
            self._gate.leave_sample(self, entry)

    def handed_out(self) -> None:
        """See `serving.admission.Slot.handed_out`."""
        self.handed_out_at = self._gate.now()

    def taken(self) -> None:
        """See `serving.admission.Slot.taken`."""
        self.handed_out_at = None

    @property
    def num_begun(self) -> int:
        """Number of samples that have got slots, if the request has several."""
        return len(self._entries)

    @property
    def entries(self) -> Collection[QueueEntry]:
        """The entries of the request and of its samples that have begun."""
        own = () if self.entry is None or self.work.is_search else (self.entry,)
        return self._entries.values() or own

    def record_tokens(self, sample: int, count: int) -> None:
        """See `serving.admission.Slot.record_tokens`."""
        found = self._samples.get(sample)
        if found is None:
            found = self._samples[sample] = _Sample()
            entry = self._entries.get(sample, self.entry)
            if entry is not None:
                self._gate.prefilled(entry, len(self.prompt_of(sample)))
        found.output += count

    def record_usage(self, sample: int, cached_tokens: int) -> None:
        """See `serving.admission.Slot.record_usage`."""
        self._samples[sample].cached = cached_tokens

    def record_recomputed(self, count: int) -> None:
        """See `serving.admission.Slot.record_recomputed`."""
        self.recomputed_tokens += count

    @property
    def num_started(self) -> int:
        """Number of samples that have started."""
        return len(self._samples)

    def prompt_tokens(self) -> int:
        """Return the prompt tokens of the samples that have started."""
        return sum(len(self.prompt_of(sample)) for sample in self._samples)

    def cached_tokens(self) -> int:
        """Return the cached prompt tokens of the samples that have ended."""
        return sum(max(0, sample.cached) for sample in self._samples.values())

    def output_tokens(self) -> int:
        """Return the output tokens of all samples."""
        return sum(sample.output for sample in self._samples.values())

    def prompt_of(self, sample: int) -> Sequence[int]:
        """Return the token ids of a sample's prompt."""
        return self.work.prompts[sample // self.work.num_samples]

    def _is_prompt_new(self, sample: int) -> bool:
        number = self.work.num_samples
        return all(other // number != sample // number for other in self._entries)
