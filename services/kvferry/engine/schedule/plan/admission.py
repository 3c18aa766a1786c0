"""Admission of waiting sequences to a step: in the order of the policy, until the budget, the sequence limit or the
pages are exhausted.

A sequence is admitted if it fits into the free pages that admitted sequences do not need:

    pages   [ held by tables, exports, stores | free, including cached content ]
    free    [ needed by admitted prompts | reserve | for new sequences ]

A prompt that is computed in chunks allocates its pages chunk by chunk, so the pages of later chunks are still free. Two
long prompts that fit one after the other but not together would both be admitted, and would then preempt each other
repeatedly. Therefore all pages for the tokens of an admitted prompt are counted from the start. Pages for tokens to be
generated are not counted: their number is unknown, and preemption handles them (Kwon et al., PagedAttention, section
4.5).

A sequence whose next missing block is just being computed or loaded for another sequence waits for that block instead
of computing it a second time. Thus the `n` samples of a request, and requests that arrive together with a common
prefix, compute or fetch that prefix only once (Kwon et al., PagedAttention, section 4.4); each sequence itself computes
only its last, partly filled block, so that no page is written by two sequences.

A sequence whose adapter has no free slot is passed over. After `_MAX_OVERTAKEN` later sequences with adapters were
admitted instead, none is admitted until the first sequence has a slot. Running sequences end and free one, so no
sequence starves.
"""

from collections.abc import Iterable
from functools import partial

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockHash, RequestId
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.schedule.blocks.allocation import Allocator
from kvferry.engine.schedule.blocks.cached_prefix import CachedPrefix
from kvferry.engine.schedule.plan.admitted import AdmittedSequences
from kvferry.engine.schedule.plan.lookahead import share
from kvferry.engine.schedule.plan.step_budget import StepBudget
from kvferry.engine.schedule.policies.background import is_background
from kvferry.engine.schedule.policies.policy import SchedulingPolicy
from kvferry.engine.schedule.policies.scored_prompts import ScoredPromptsQueue
from kvferry.engine.schedule.step.adapter_slots import NO_SLOT, AdapterSlots
from kvferry.engine.schedule.step.sequence import Sequence, SequenceEvent
from kvferry.engine.schedule.step.step import ScheduledSequence

_MAX_FOLLOWERS = 32
"""Maximum number of sequences per step that may be found waiting for another sequence's block; bounds the step's
time."""
_MAX_UNLOADED = 256
"""Maximum number of sequences set aside in one step because their adapter is being loaded."""
_MAX_PASSED = 256
"""Maximum number of sequences without a slot that one step passes over; bounds the step's time."""
_MAX_OVERTAKEN = 32
"""Number of later sequences with adapters that may be admitted before the first one that waits for a slot."""


def num_lacking(allocator: Allocator, admitted: Iterable[Sequence]) -> int:
    """Return the number of pages that admitted sequences may still have to allocate for their current tokens.

    Args:
        allocator: the allocator of pages.
        admitted: running sequences, and those whose KV is being loaded.
    """
    return sum(allocator.missing(s.kv.table, s.num_tokens) for s in admitted)


def cached_prefix(allocator: Allocator, sequence: Sequence) -> CachedPrefix:
    """Return the pages of the longest cached prefix that a sequence can use, without taking references. The cache is
    searched again only if it has changed, since a waiting sequence is ranked repeatedly before it is admitted."""
    version, limit, last = allocator.cache_version, sequence.sampling.num_reusable, sequence.kv.last_lookup
    if last is not None and last[0] == version and last[1] == limit:
        return last[2]
    found = allocator.peek(sequence.name_blocks(), sequence.sampling.tokens, max_tokens=limit)
    sequence.kv.remember_lookup(version, limit, found)
    return found


def num_remaining(allocator: Allocator, sequence: Sequence) -> int:
    """Return the number of tokens of a waiting sequence that are not cached."""
    return sequence.num_tokens - len(cached_prefix(allocator, sequence)) * allocator.block_tokens


class Headroom:
    """Pages available to new sequences during the admissions of one step. Reads the allocator without changing it."""

    def __init__(self, allocator: Allocator, admitted: Iterable[Sequence], *, reserve: int) -> None:
        """
        Args:
            allocator: the allocator of pages.
            admitted: running sequences, and those whose KV is being loaded.
            reserve: number of pages that must stay free while other sequences are admitted.
        """
        self._allocator = allocator
        self._reserve = reserve
        known = tuple(admitted)
        self._has_others = bool(known)
        self._promised = num_lacking(allocator, known)

    def fits(self, hit: CachedPrefix, num_tokens: int) -> bool:
        """Return whether all tokens of a new sequence fit into the free pages that are not reserved for admitted
        sequences.

        Args:
            hit: its longest cached prefix.
            num_tokens: number of current tokens, prompt and generated.
        """
        reserve = self._reserve if self._has_others else 0
        return self._allocator.needed(hit, num_tokens) <= self._allocator.pool.num_free - self._promised - reserve

    def fits_whole(self, hit: CachedPrefix, num_tokens: int) -> bool:
        """Return whether the pages for all blocks after a hit fit in all groups, before windows release any.

        Args:
            hit: longest cached prefix of a new sequence.
            num_tokens: number of current tokens, prompt and generated.
        """
        if not self._allocator.has_windows:
            return True
        whole = (self._allocator.blocks_for(num_tokens) - len(hit)) * len(self._allocator.windows)
        return whole + self._allocator.num_free(hit) <= self._allocator.pool.num_free - self._promised

    def admit(self, newcomer: Sequence) -> None:
        """Admit a sequence whose table has the pages of its first chunk; its remaining pages are reserved for it."""
        self._has_others = True
        self._promised += self._allocator.missing(newcomer.kv.table, newcomer.num_tokens)


def next_block(sequence: Sequence) -> BlockHash | None:
    """Return the name of the block that an admitted sequence computes or loads next; `None` if it is not full yet."""
    kv = sequence.kv
    return kv.names[kv.num_listed] if kv.num_listed < len(kv.names) else None


class Admission:
    """Queue of the waiting sequences of one scheduler, from which sequences are admitted."""

    def __init__(
        self,
        limits: SchedulerLimits,
        allocator: Allocator,
        policy: SchedulingPolicy,
        *,
        admitted: AdmittedSequences,
        slots: AdapterSlots,
    ) -> None:
        """
        Args:
            limits: limits of a step.
            allocator: allocator of KV pages.
            policy: scheduling policy.
            admitted: running and loading sequences of the scheduler.
            slots: adapter slots of the engine.
        """
        self._limits = limits
        self._allocator = allocator
        self._policy = policy
        self._waiting = policy.make_queue(partial(num_remaining, allocator), limits.weights)
        self._has_turns = False
        """Whether the queue admits prompts with log-probabilities one at a time, once there are any."""
        self._admitted = admitted
        self._slots = slots
        self._reserve = int(allocator.pool.num_blocks * limits.reserve_share)
        self._started: list[RequestId] = []
        self.num_waiting_background = 0
        """Number of sequences of the lowest priority in the queue."""
        self.num_queried_tokens = self.num_hit_tokens = 0
        """Number of tokens looked up in the prefix cache at the first admission of each sequence, and number of tokens
        found."""

    # ------------------------------------------------------------------ the queue

    def wait(self, sequence: Sequence) -> None:
        """Add a sequence to the queue, new, preempted, or with a failed load."""
        if sequence.sampling.is_scoring and not self._has_turns:
            pauses = self._policy.background_period(self._limits) > 1
            self._waiting = ScoredPromptsQueue(self._waiting, self._policy.order, has_background=pauses)
            self._has_turns = True
        self._waiting.add(sequence)
        self.num_waiting_background += is_background(sequence)

    def withdraw(self, sequence: Sequence, event: SequenceEvent) -> None:
        """Remove a sequence that ends from the queue."""
        self._leave(sequence)
        sequence.move(event)

    def _leave(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        self.num_waiting_background -= is_background(sequence)

    @property
    def num_waiting(self) -> int:
        """Number of sequences in the queue."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Number of uncomputed tokens of the sequences in the queue, including cached tokens."""
        return self._waiting.num_tokens

    @property
    def first_waiting(self) -> Sequence | None:
        """The sequence to admit next; `None` if the queue is empty."""
        return self._waiting.first()

    # ------------------------------------------------------------------ admission

    def admit(
        self, room: StepBudget, planned: list[ScheduledSequence], *, before: Sequence | None = None,
        foreground: bool = False,
    ) -> None:  # fmt: skip
        """Admit waiting sequences while they fit.

        Args:
            room: remaining budget of the step; reduced by the tokens of the admitted sequences.
            planned: the step's sequences so far; admitted ones are appended.
            before: if set, only sequences that precede this running sequence are admitted.
            foreground: whether sequences of the lowest priority are not admitted.
        """
        if not len(self._waiting) or not self.has_slot:
            return
        skipped: list[Sequence] = []
        num_followers = num_unloaded = 0
        passed: list[Sequence] = []
        pages = self._headroom()
        # A prompt whose rows are scored is computed slowly; others do not wait for its blocks.
        # Neither do foreground sequences wait for those of a background sequence, which may pause.
        computing = [s for s in self._admitted if not s.sampling.is_scoring]
        pending = {next_block(s) for s in computing if not is_background(s)}
        in_background = {next_block(s) for s in computing if is_background(s)}
        while room.tokens > 0 and (sequence := self._waiting.first()) is not None:
            if foreground and is_background(sequence):
                break
            if sequence.kv.is_lookup_pending:
                self._waiting.set_aside(sequence)
                skipped.append(sequence)
                continue
            if not self._is_loaded(sequence):
                num_unloaded += 1
                if num_unloaded > _MAX_UNLOADED:
                    break
                self._waiting.set_aside(sequence)
                skipped.append(sequence)
                continue
            if self._lacks_slot(sequence, passed):
                if len(passed) == _MAX_PASSED:
                    break
                self._waiting.set_aside(sequence)
                passed.append(sequence)
                continue
            if before is not None:
                remaining = num_remaining(self._allocator, sequence)
                if not self._policy.precedes(sequence, remaining, before):
                    break
            if not self.has_slot:
                break
            hit = cached_prefix(self._allocator, sequence)
            if self._awaits(sequence, len(hit), pending | in_background if is_background(sequence) else pending):
                num_followers += 1
                if num_followers > _MAX_FOLLOWERS:
                    break
                self._waiting.set_aside(sequence)
                skipped.append(sequence)
                continue
            if not self._admit_one(sequence, hit, room, pages, planned):
                break
            if not sequence.sampling.is_scoring:
                (in_background if is_background(sequence) else pending).add(next_block(sequence))
            if passed and sequence.request.adapter is not None:
                passed[0].overtaken()
        for sequence in (*skipped, *passed):
            self._waiting.add(sequence)

    def has_room_for(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence fits now."""
        if not self._is_loaded(sequence):
            return True  # more pages would not start it
        if self._lacks_slot(sequence, []):
            return False
        hit = cached_prefix(self._allocator, sequence)
        return self.has_slot and self._headroom().fits(hit, sequence.num_tokens)

    def give_back_slot(self, sequence: Sequence) -> None:
        """Free the adapter slot of a sequence that ends or waits again; no effect if it has none."""
        if sequence.request.adapter is not None and sequence.adapter_slot != NO_SLOT:
            self._slots.give_back(sequence.request.adapter)
            sequence.give_back_slot()

    def start(self, sequence: Sequence) -> None:
        """Add a sequence whose KV was loaded to the running sequences."""
        self._admitted.run(sequence, SequenceEvent.LOADED)
        self._started.append(sequence.request_id)

    def take_started(self) -> list[RequestId]:
        """Return the requests that were admitted or loaded since the last call."""
        started, self._started = self._started, []
        return started

    def _headroom(self) -> Headroom:
        return Headroom(self._allocator, self._admitted, reserve=self._reserve)

    @property
    def has_slot(self) -> bool:
        """Whether another sequence may hold pages."""
        return len(self._admitted) < self._limits.max_num_seqs

    def _is_loaded(self, sequence: Sequence) -> bool:
        """Return whether the weights of a sequence's adapter are in memory; if not, they are being loaded."""
        return sequence.request.adapter is None or self._slots.is_ready(sequence.request.adapter)

    def _lacks_slot(self, sequence: Sequence, passed: list[Sequence]) -> bool:
        """Return whether a sequence is passed over: its adapter has no slot, or the first sequence passed over takes
        precedence."""
        if sequence.request.adapter is None:
            return False
        is_reserved = bool(passed) and passed[0].num_overtaken >= _MAX_OVERTAKEN
        return is_reserved or not self._slots.can_take(sequence.request.adapter)

    def _awaits(self, sequence: Sequence, num_hit: int, pending: set[BlockHash | None]) -> bool:
        """Return whether another sequence is computing or loading the block after the cached prefix, so that this
        sequence can use it."""
        is_usable = (num_hit + 1) * self._allocator.block_tokens <= sequence.sampling.num_reusable
        return is_usable and sequence.kv.names[num_hit] in pending

    def _admit_one(
        self,
        sequence: Sequence,
        hit: CachedPrefix,
        room: StepBudget,
        pages: Headroom,
        planned: list[ScheduledSequence],
    ) -> bool:
        """Admit a sequence that starts from a cached prefix; return whether it fits."""
        hit_tokens = len(hit) * self._allocator.block_tokens
        remote = sequence.kv.remote
        # Blocks that were cached at the time of the lookup may have been evicted since, which leaves a gap.
        fetches = remote is not None and remote.first_token <= hit_tokens < remote.num_tokens
        if remote is not None and fetches and self._allocator.has_windows and not remote.has_all_pages:
            limit = min(sequence.sampling.num_reusable, remote.num_tokens)
            names, tokens = sequence.name_blocks(), sequence.sampling.tokens
            hit = self._allocator.peek(names, tokens, max_tokens=limit, for_load=True)
            hit_tokens = len(hit) * self._allocator.block_tokens
        num_uncomputed = sequence.num_tokens - hit_tokens
        in_background = is_background(sequence)
        count = room.fit(num_uncomputed, in_background=in_background)
        count = room.fit_scored(sequence.sampling, hit_tokens, count)
        if count == 0 and not fetches:
            return False
        upto = sequence.num_tokens if fetches else hit_tokens + count
        if not pages.fits(hit, sequence.num_tokens):  # counts all its tokens, not only the first chunk
            return False
        if remote is not None and fetches and remote.has_all_pages and not pages.fits_whole(hit, upto):
            sequence.kv.drop_remote(unloaded_from=hit_tokens)  # computing needs fewer pages at once
            return self._admit_one(sequence, hit, room, pages, planned)
        self._allocator.hold(sequence.kv.table, hit)
        table = sequence.kv.table
        if remote is not None and fetches and not remote.has_all_pages:
            is_held = self._allocator.reserve_load(table, num_loaded=remote.num_tokens, num_tokens=upto)
        else:
            is_held = self._allocator.grow(table, num_tokens=upto)
        if not is_held:
            raise InvariantBroken("the pages of an admitted sequence could not be allocated")
        if sequence.request.adapter is not None:
            sequence.take_slot(self._slots.take(sequence.request.adapter))
        pages.admit(sequence)
        self._leave(sequence)
        sequence.kv.start_from(len(hit), self._allocator.block_tokens)
        if not sequence.num_preemptions:
            self.num_queried_tokens += sequence.num_tokens
            self.num_hit_tokens += hit_tokens
        if remote is not None and fetches:
            if remote.has_all_pages:
                blocks = range(len(hit), self._allocator.blocks_for(remote.num_tokens))
                targets = table.whole_blocks(blocks)
            else:
                size, windows = self._allocator.block_tokens, self._allocator.windows
                targets = table.handed_over(windows, remote.num_tokens, size)[len(hit) :]
            self._admitted.load(sequence, len(hit), targets)
            return True
        sequence.kv.drop_remote(unloaded_from=hit_tokens)
        self._admitted.run(sequence, SequenceEvent.ADMIT)
        self._started.append(sequence.request_id)
        planned.append(share(sequence, count))
        room.take(num_uncomputed, count, planned[-1].num_scored, in_background=in_background)
        return True
