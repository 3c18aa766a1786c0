"""The slot of one request: counts the tokens that the request uses, to free its capacity and correct its charge."""

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Protocol

from kvferry.gateway.decide.flow.entry import Entry
from kvferry.serving.admission import Work
from kvferry.serving.request import Caller


class Gate(Protocol):
    """The methods of the flow gate that a slot uses. A protocol, because the gate makes slots and imports this
    module."""

    async def admit(self, slot: "RequestSlot") -> None:
        """Wait until the request may start."""
        ...

    def leave(self, slot: "RequestSlot", *, is_whole: bool) -> None:
        """Free the request's slot.

        Args:
            slot: the request's slot.
            is_whole: whether the request ended without an error.
        """
        ...

    def prefilled(self, entry: Entry, num_tokens: int) -> None:
        """Free the capacity of computed prompt tokens.

        Args:
            entry: a dispatched entry.
            num_tokens: number of tokens of one sample's prompt, which has been computed.
        """
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
        "_gate", "_samples", "entered", "entry", "expected_tokens", "priority", "queued_seconds", "recomputed_tokens",
        "work",
    )  # fmt: skip

    def __init__(self, gate: Gate, work: Work) -> None:
        self._gate = gate
        self._samples: dict[int, _Sample] = {}
        self.work = work
        self.queued_seconds = 0.0
        self.priority = work.caller.priority
        self.entry: Entry | None = None
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

    def record_tokens(self, sample: int, count: int) -> None:
        """See `serving.admission.Slot.record_tokens`."""
        found = self._samples.get(sample)
        if found is None:
            found = self._samples[sample] = _Sample()
            if self.entry is not None:
                self._gate.prefilled(self.entry, len(self._prompt(sample)))
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
        return sum(len(self._prompt(sample)) for sample in self._samples)

    def cached_tokens(self) -> int:
        """Return the cached prompt tokens of the samples that have ended."""
        return sum(max(0, sample.cached) for sample in self._samples.values())

    def output_tokens(self) -> int:
        """Return the output tokens of all samples."""
        return sum(sample.output for sample in self._samples.values())

    def _prompt(self, sample: int) -> Sequence[int]:
        return self.work.prompts[sample // self.work.num_samples]
