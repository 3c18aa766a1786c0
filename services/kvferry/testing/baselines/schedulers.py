"""Baseline schedulers: contiguous reservations for whole requests, static batches, and pages without sharing.

A reserved chunk is at least as large as its sequence's pages, so the underlying production block pool never runs short:
admission depends on the reservations alone.
"""

from collections.abc import Callable, Sequence

from kvferry.core.ids import BlockHash, RequestId
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.schedule.blocks.allocation import Allocator
from kvferry.engine.schedule.blocks.block_pool import BlockPool
from kvferry.engine.schedule.blocks.cached_prefix import CachedPrefix
from kvferry.engine.schedule.blocks.prefix_index import PrefixIndex
from kvferry.engine.schedule.plan.admission import Admission, Headroom
from kvferry.engine.schedule.plan.scheduler import Scheduler
from kvferry.engine.schedule.plan.step_budget import StepBudget
from kvferry.engine.schedule.speculation.speculation import Speculation
from kvferry.engine.schedule.step.sequence import Sequence as EngineSequence
from kvferry.engine.schedule.step.step import ScheduledSequence
from kvferry.testing.baselines.buddy import BuddyMemory

Rule = Callable[[EngineSequence], int]
"""Function that returns the number of slots to reserve for a sequence. In a simulation, `max_tokens_total` is the
sequence's true length.
"""


def whole_context(context: int) -> Rule:
    """Return the rule that reserves the model's context length: Orca (Max).

    Args:
        context: context length in tokens.
    """
    return lambda sequence: context


def power_of_two(context: int) -> Rule:
    """Return the rule that reserves the prompt, and the output rounded up to a power of two: Orca (Pow2).

    Args:
        context: context length in tokens, which bounds the reservation.
    """

    def rule(sequence: EngineSequence) -> int:
        num_prompt = sequence.request.num_prompt
        output = sequence.request.max_tokens_total - num_prompt
        return min(context, num_prompt + (1 << (output - 1).bit_length()))

    return rule


def true_length(sequence: EngineSequence) -> int:
    """Reserve the prompt and the true output: Orca (Oracle), which cannot be built in practice."""
    return sequence.request.max_tokens_total


class PrivatePages(Allocator):
    """Allocator that never finds a prefix in the cache, so that no two sequences share pages."""

    def peek(
        self, names: Sequence[BlockHash], tokens: Sequence[int], *, max_tokens: int, for_load: bool = False
    ) -> CachedPrefix:
        """Return an empty prefix, since no pages are shared."""
        return CachedPrefix()


class _ReservingAdmission(Admission):
    """Admits a sequence when a chunk for its whole length is free, and holds the chunk until it ends."""

    memory: BuddyMemory
    rule: Rule
    chunks: dict[RequestId, tuple[int, int]]

    @property
    def has_slot(self) -> bool:
        """Whether a chunk is free for the first waiting sequence."""
        first = self._waiting.first()
        return super().has_slot and (first is None or self.memory.fits(self.rule(first)))

    def give_back_slot(self, sequence: EngineSequence) -> None:
        """Free a sequence's chunk."""
        super().give_back_slot(sequence)
        chunk = self.chunks.pop(sequence.request_id, None)
        if chunk is not None:
            self.memory.give(chunk)

    def _admit_one(
        self, sequence: EngineSequence, hit: CachedPrefix, room: StepBudget, pages: Headroom,
        planned: list[ScheduledSequence],
    ) -> bool:  # fmt: skip
        chunk = self.memory.take(self.rule(sequence))
        if chunk is None:
            return False
        if not super()._admit_one(sequence, hit, room, pages, planned):
            self.memory.give(chunk)
            return False
        self.chunks[sequence.request_id] = chunk
        return True


class ReservingScheduler(Scheduler):
    """Scheduler with iteration-level batching over reserved chunks (Yu et al., Orca, OSDI 2022)."""

    def __init__(
        self, limits: SchedulerLimits, allocator: Allocator, speculation: Speculation | None, *, memory: BuddyMemory,
        rule: Rule,
    ) -> None:  # fmt: skip
        """
        Args:
            limits: see `Scheduler`.
            allocator: see `Scheduler`.
            speculation: see `Scheduler`.
            memory: memory of token slots from which a sequence's chunk is reserved.
            rule: number of token slots to reserve for a sequence.
        """
        super().__init__(limits, allocator, speculation)
        self.memory, self.rule = memory, rule
        self.chunks: dict[RequestId, tuple[int, int]] = {}
        admission = self.admission = _ReservingAdmission(
            limits, allocator, self._policy, admitted=self._admitted, slots=self.slots
        )
        admission.memory, admission.rule, admission.chunks = memory, rule, self.chunks


class _StaticAdmission(Admission):
    batch: int

    @property
    def has_slot(self) -> bool:
        """Whether no batch is running, or the batch being filled has room."""
        running = self._admitted.running
        is_filling = all(s.sampling.num_generated == 0 and not s.kv.num_computed for s in running)
        return (not running or is_filling) and len(running) < self.batch


class StaticScheduler(Scheduler):
    """Scheduler that runs a batch of a fixed size to its end before it starts the next one (FasterTransformer-like)."""

    def __init__(
        self, limits: SchedulerLimits, allocator: Allocator, speculation: Speculation | None, *, batch: int
    ) -> None:
        """
        Args:
            limits: see `Scheduler`.
            allocator: see `Scheduler`.
            speculation: see `Scheduler`.
            batch: maximum number of sequences in a batch.
        """
        super().__init__(limits, allocator, speculation)
        admission = self.admission = _StaticAdmission(
            limits, allocator, self._policy, admitted=self._admitted, slots=self.slots
        )
        admission.batch = batch


def private_pages(num_blocks: int, block_tokens: int) -> Allocator:
    """Return an allocator that shares no pages."""
    index = PrefixIndex()
    return PrivatePages(BlockPool(num_blocks, on_reuse=index.forget), index, block_tokens=block_tokens)
