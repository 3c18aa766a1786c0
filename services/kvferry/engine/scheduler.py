"""What to compute in the next step: a pure decision over sequences, pages and a token budget.

One step, in order:

1. *Running* sequences, oldest first, each get min(N - C, chunk limit, budget left) tokens; where any decodes, all
   prompts together get no more than `max_mixed_tokens`, so that nobody's next token waits for long. When pages are
   short, the youngest running sequence is preempted: its pages go back, C returns to 0, its tokens stay,
   and it waits at the front of the line to be recomputed (Kwon et al., PagedAttention, section 4.5).
2. *Waiting* sequences, in order of arrival, start from their longest cached prefix (C = hit, at most N - 1)
   while budget, places and pages last; the first that does not fit ends admission, so nobody is overtaken
   for ever. A small reserve of pages is left to those already running. A sequence whose KV is at a peer or in a
   tier gets its pages and leaves as a `LoadJob` instead; it joins the running ones when its KV is here. One that
   does not know yet what the tiers have is passed over for a moment.

There is no prefill phase and no decode phase, only N - C (see `sequence`). `schedule` changes tables and
queues; `update` must be called with its result before the next `schedule`.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockId, RequestId
from kvferry.core.sampling import FinishReason, SampledToken
from kvferry.engine.allocation import Allocator, BlockTable, PageCopy
from kvferry.engine.jobs import Export, LoadJob, Progress, StoreJob
from kvferry.engine.plans import is_same, one_ahead, share
from kvferry.engine.room import Room, SchedulerLimits
from kvferry.engine.sequence import RemoteKv, Sequence, SequenceEvent, SequenceState
from kvferry.engine.step import ScheduledSequence, StepPlan, StepResult
from kvferry.kv.tiering import ObjectKey


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What one step meant for one sequence."""

    request_id: RequestId
    token: SampledToken
    finish_reason: FinishReason | None
    num_cached: int
    export: Export | None = None
    """Set when the sequence exports and finished drawing its token: the receiver now owns these references."""
    kept: Export | None = None
    """Set when the sequence keeps and has ended: where its full blocks are. Nobody owns a reference: they are there
    until their epochs change."""


class Scheduler:
    """Owns every sequence from `add` to its end. One thread."""

    def __init__(self, limits: SchedulerLimits, allocator: Allocator) -> None:
        self.limits = limits
        self.allocator = allocator
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._loading: dict[RequestId, Sequence] = {}
        self._known: dict[RequestId, Sequence] = {}
        self._loads: list[LoadJob] = []
        self._stores: list[StoreJob] = []
        self._progress: list[Progress] = []
        self.object_blocks = 0
        """Blocks in a storage object; 0: nothing is stored."""
        self._next_arrival = 0
        self.num_preemptions = 0

    # ------------------------------------------------------------------ intake and exit

    def add(self, sequence: Sequence) -> None:
        """Take a new sequence.

        Raises:
            InvariantBroken: its id is known, or it can never fit; the edge checks both before.
        """
        if sequence.request_id in self._known:
            raise InvariantBroken(f"request {sequence.request_id} was added twice")
        if self.allocator.blocks_for(sequence.max_tokens_total) > self.allocator.pool.num_blocks:
            raise InvariantBroken(f"request {sequence.request_id} needs more blocks than the pool has")
        sequence.arrival = self._next_arrival
        self._next_arrival += 1
        self._known[sequence.request_id] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: RequestId) -> bool:
        """End a sequence now, giving its pages back; whether it was there. Idempotent."""
        sequence = self._known.pop(request_id, None)
        if sequence is None:
            return False
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        elif sequence.state is SequenceState.LOADING:
            del self._loading[request_id]
        else:
            self._running.remove(sequence)
        sequence.move(SequenceEvent.ABORT)
        sequence.finish_reason = FinishReason.CANCELLED
        self.allocator.free(sequence.table)
        self._loads = [job for job in self._loads if job.request_id != request_id]
        return True

    # ------------------------------------------------------------------ the step

    def schedule(self) -> StepPlan:
        """The next step. Empty when nothing can run now."""
        room = Room(self.limits, self._running, len(self._waiting))
        planned: list[ScheduledSequence] = []
        copies: list[PageCopy] = []
        preempted_before = self.num_preemptions
        for sequence in list(self._running):
            if room.tokens == 0:
                break
            if sequence.state is not SequenceState.RUNNING:
                continue  # preempted by an older one in this very loop
            wanted = sequence.num_tokens - sequence.num_computed
            count = room.fit(wanted)
            if count == 0:
                continue  # a prompt; those who decode still find room
            made = self._grow_or_preempt(sequence, count)
            if made is None:
                continue
            copies += made
            planned.append(share(sequence, count))
            room.take(wanted, count)
        if self.num_preemptions == preempted_before:  # pages are short enough to take some back: nobody new
            self._admit(room, planned)
        return StepPlan(tuple(planned), tuple(copies))

    def follow(self, plan: StepPlan) -> StepPlan | None:
        """The step after one that was launched and not booked yet; `None`: it must be booked first.

        Whoever launches it gives it to `update` next, and calls `schedule` only after that.
        """
        if self._waiting or self._loading or len(plan.scheduled) != len(self._running):
            return None
        return one_ahead(plan, self._known, self.allocator)

    def is_wanted(self, item: ScheduledSequence) -> bool:
        """Whether the sequence of a share is still here."""
        sequence = self._known.get(item.request_id)
        return sequence is not None and is_same(sequence, item)

    def take_loads(self) -> list[LoadJob]:
        """Fetches that became due in `schedule`; each is handed out once."""
        loads, self._loads = self._loads, []
        return loads

    def take_stores(self) -> list[StoreJob]:
        """Objects that became whole since the last call. Hold their pages at once: `schedule` may reuse them."""
        stores, self._stores = self._stores, []
        return stores

    def take_progress(self) -> list[Progress]:
        """Blocks that became full in prompts which will be handed over, since the last call."""
        progress, self._progress = self._progress, []
        return progress

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Book what a step computed; sequences that ended meanwhile are passed over.

        Raises:
            InvariantBroken: a token is missing, or came for a sequence that did not sample.
        """
        updates: list[SequenceUpdate] = []
        for item in plan.scheduled:
            sequence = self._known.get(item.request_id)
            if sequence is None or not is_same(sequence, item):
                continue
            sequence.num_computed += item.num_scheduled
            self._list_full_blocks(sequence)
            drawn = result.tokens.get(item.request_id)
            if (drawn is not None) != item.samples:
                raise InvariantBroken(f"request {item.request_id}: samples={item.samples} but token={drawn}")
            if drawn is not None:
                updates.append(self._append(sequence, drawn))
        return updates

    # ------------------------------------------------------------------ loads

    def answered(self, request_id: RequestId, remote: RemoteKv | None) -> bool:
        """The tiers said what they have; whether anybody still waits for that."""
        sequence = self._known.get(request_id)
        if sequence is None or not sequence.is_asking:
            return False
        sequence.is_asking = False
        sequence.remote = remote
        return True

    def loaded(self, request_id: RequestId, num_tokens: int, *, is_stored: bool = False) -> bool:
        """KV is here and verified up to `num_tokens`; whether anybody still waits for it.

        Args:
            is_stored: it came from the tiers, and need not be given to them again.
        """
        sequence = self._loading.pop(request_id, None)
        if sequence is None:
            return False
        sequence.num_computed = max(sequence.num_computed, num_tokens)
        if is_stored:
            sequence.num_stored = max(sequence.num_stored, num_tokens // self.allocator.block_tokens)
        sequence.remote = None
        sequence.move(SequenceEvent.LOADED)
        self._list_full_blocks(sequence)
        self._running.append(sequence)
        self._running.sort(key=lambda s: s.arrival)
        return True

    def load_failed(self, request_id: RequestId) -> Sequence | None:
        """A fetch failed: the sequence goes to the front of the line and computes its tokens itself; `None`: nobody
        waits for it any more.

        Its pages are given back at once; those that a transport may still write stay in quarantine.
        """
        sequence = self._loading.pop(request_id, None)
        if sequence is None:
            return None
        self.allocator.free(sequence.table)
        sequence.num_computed = sequence.num_listed = 0
        sequence.remote = None
        sequence.move(SequenceEvent.LOAD_FAILED)
        self._waiting.appendleft(sequence)
        return sequence

    # ------------------------------------------------------------------ views

    @property
    def num_waiting(self) -> int:
        """Sequences without pages."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that take part in steps."""
        return len(self._running)

    @property
    def num_loading(self) -> int:
        """Sequences whose KV is on its way."""
        return len(self._loading)

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is left; offers may still hold pages."""
        return not self._known

    def tables(self) -> Iterable[BlockTable]:
        """Every live table, for integrity checks."""
        return (s.table for s in self._known.values())

    # ------------------------------------------------------------------ inside

    def _grow_or_preempt(self, sequence: Sequence, count: int) -> list[PageCopy] | None:
        while True:
            copies = self.allocator.grow(
                sequence.table, num_computed=sequence.num_computed, num_tokens=sequence.num_computed + count
            )
            if copies is not None:
                return copies
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return None

    def _preempt(self, victim: Sequence) -> None:
        self._running.remove(victim)
        self.allocator.free(victim.table)
        victim.num_computed = victim.num_listed = victim.num_told = 0
        victim.num_preemptions += 1
        victim.move(SequenceEvent.PREEMPT)
        self._waiting.appendleft(victim)
        self.num_preemptions += 1

    def _admit(self, room: Room, planned: list[ScheduledSequence]) -> None:
        asking: list[Sequence] = []
        while self._waiting and room.tokens > 0:
            sequence = self._waiting[0]
            if sequence.is_asking:
                asking.append(self._waiting.popleft())
                continue
            if len(self._running) + len(self._loading) >= self.limits.max_sequences:
                break
            hit = self.allocator.peek(sequence.name_blocks(), sequence.tokens, max_tokens=sequence.num_tokens - 1)
            hit_tokens = len(hit) * self.allocator.block_tokens
            remote = sequence.remote
            # What was cached here when the tiers were asked may have been evicted since: then there is a gap.
            fetches = remote is not None and remote.first_token <= hit_tokens < remote.num_tokens
            wanted = sequence.num_tokens - hit_tokens
            count = room.fit(wanted)
            if count == 0 and not fetches:
                break
            upto = sequence.num_tokens if fetches else hit_tokens + count
            if not self._has_room(hit, sequence.num_tokens):  # for all its tokens, though the first chunk takes fewer
                break
            self.allocator.hold(sequence.table, hit)
            if self.allocator.grow(sequence.table, num_computed=hit_tokens, num_tokens=upto) is None:
                raise InvariantBroken("room was counted but could not be allocated")
            self._waiting.popleft()
            sequence.num_computed = hit_tokens
            sequence.num_listed = len(hit)
            sequence.num_stored = max(sequence.num_stored, len(hit))
            if not sequence.num_preemptions:
                sequence.num_cached = hit_tokens
            if fetches:
                self._start_load(sequence, len(hit))
                continue
            sequence.remote = None
            sequence.move(SequenceEvent.ADMIT)
            self._running.append(sequence)
            planned.append(share(sequence, count))
            room.take(wanted, count)
        self._waiting.extendleft(reversed(asking))
        self._running.sort(key=lambda s: s.arrival)

    def _has_room(self, hit: list[BlockId], num_tokens: int) -> bool:
        pool = self.allocator.pool
        free_hits = sum(1 for b in hit if pool.refs(b) == 0)
        needed = self.allocator.blocks_for(num_tokens) - len(hit) + free_hits
        reserve = int(pool.num_blocks * self.limits.reserve_share) if self._running or self._loading else 0
        return needed <= pool.num_free - reserve

    def _start_load(self, sequence: Sequence, first_block: int) -> None:
        remote = sequence.remote
        if remote is None:
            raise InvariantBroken(f"request {sequence.request_id} has nothing to load")
        last = self.allocator.blocks_for(remote.num_tokens)
        targets = tuple(sequence.table.blocks[first_block:last])
        sequence.move(SequenceEvent.LOAD)
        self._loading[sequence.request_id] = sequence
        self._loads.append(LoadJob(sequence.request_id, remote, first_block, targets))

    def _list_full_blocks(self, sequence: Sequence) -> None:
        size = self.allocator.block_tokens
        full = sequence.num_computed // size
        if full <= sequence.num_listed:
            return
        names = sequence.name_blocks()
        for i in range(sequence.num_listed, full):
            self.allocator.index.add(
                names[i],
                sequence.tokens[i * size : (i + 1) * size],
                sequence.table.blocks[i],
                parent=names[i - 1] if i else None,
                depth=i,
            )
        sequence.num_listed = full
        self._offer_to_tiers(sequence, full)
        if sequence.exports and sequence.num_computed < sequence.num_tokens:
            new = slice(sequence.num_told, full)
            pages = tuple(sequence.table.blocks[new])
            epochs = tuple(self.allocator.pool.epochs[b] for b in pages)
            self._progress.append(Progress(sequence.request_id, pages, epochs, tuple(names[new])))
            sequence.num_told = full

    def _offer_to_tiers(self, sequence: Sequence, full: int) -> None:
        """Give whole objects among the first `full` blocks to the tiers, each once."""
        size = self.object_blocks
        if not size:
            return
        for end in range((sequence.num_stored // size + 1) * size, full + 1, size):
            key = ObjectKey(sequence.names[end - 1], sequence.tenant)
            self._stores.append(StoreJob(key, tuple(sequence.table.blocks[end - size : end])))
            sequence.num_stored = end

    def _append(self, sequence: Sequence, drawn: SampledToken) -> SequenceUpdate:
        exported_tokens = sequence.num_tokens
        reason = sequence.append(drawn.token_id)
        if reason is None and not sequence.exports:
            return SequenceUpdate(sequence.request_id, drawn, None, sequence.num_cached)
        self._running.remove(sequence)
        del self._known[sequence.request_id]
        sequence.move(SequenceEvent.FINISH)
        sequence.finish_reason = reason
        if reason is None:  # more tokens are to come elsewhere: the pages change owners instead of being freed
            pages = tuple(sequence.table.blocks)
            export = Export(pages, tuple(self.allocator.pool.epochs[b] for b in pages), exported_tokens)
            sequence.table.blocks.clear()
            return SequenceUpdate(sequence.request_id, drawn, None, sequence.num_cached, export)
        kept = self._whereabouts(sequence) if sequence.keeps else None
        self.allocator.free(sequence.table)
        return SequenceUpdate(sequence.request_id, drawn, reason, sequence.num_cached, kept=kept)

    def _whereabouts(self, sequence: Sequence) -> Export | None:
        full = sequence.num_computed // self.allocator.block_tokens
        pages = tuple(sequence.table.blocks[:full])
        if not pages:
            return None
        return Export(pages, tuple(self.allocator.pool.epochs[b] for b in pages), full * self.allocator.block_tokens)
