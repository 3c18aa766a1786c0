"""Attribution of computed prompt tokens to causes: which blocks of a prompt are missing, and why. Pure.

Causes are found once for each start of a sequence, since blocks that other sequences add later are not used by it:

    positions   [ have KV | of a failed load | of a dearer load | blocks, one by one | last block ]

Blocks are looked up in order, until one is neither in the prefix index nor in the record of removed blocks. The names
after it are names of longer prefixes, and pages of longer prefixes are evicted first, so that all of them are counted
as `first_seen`. A new prompt therefore costs one lookup. The index may have a block that the sequence does not use,
because a block before it or its page of another layer group was evicted; it is counted as `evicted`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.core.causes import ComputeCause
from kvferry.core.hashing import BlockNamer
from kvferry.core.ids import BlockHash
from kvferry.engine.schedule.blocks.allocation import Allocator
from kvferry.engine.schedule.blocks.removed_blocks import UNKNOWN
from kvferry.engine.schedule.step.sequence import Sequence


@dataclass(slots=True)
class PromptTotals:
    """Prompt tokens of one engine since its start, by source. Written on the engine's thread, read on any thread."""

    computed: dict[ComputeCause, int] = field(default_factory=lambda: dict.fromkeys(ComputeCause, 0))
    cached: int = 0
    peer: int = 0
    """Loaded from another worker."""
    tier: int = 0
    """Loaded from a tier."""


class PromptAccounts:
    """Counts the sources of the prompts' tokens of one scheduler."""

    def __init__(self, allocator: Allocator) -> None:
        """
        Args:
            allocator: the engine's pages, with the record of removed blocks.
        """
        self._allocator = allocator
        self._former: Callable[[str], BlockNamer] | None = None
        self.totals = PromptTotals()

    def weights_changed(self, former: Callable[[str], BlockNamer]) -> None:
        """Record that blocks have other names from now on, because the weights changed.

        Args:
            former: returns the namer of a scope for the weights before the change.
        """
        self._former = former

    def loaded(self, sequence: Sequence, num_tokens: int, *, is_tier: bool) -> None:
        """Count a load that has ended; call this before the sequence's progress is changed.

        Args:
            sequence: a sequence whose load has ended.
            num_tokens: number of leading tokens that have KV now.
            is_tier: whether they were loaded from a tier.
        """
        kv = sequence.kv
        self.totals.cached += kv.account.cached_to(kv.num_computed)
        count = kv.account.loaded_to(num_tokens)
        if is_tier:
            self.totals.tier += count
        else:
            self.totals.peer += count
        if kv.remote is not None and num_tokens < kv.remote.num_tokens:
            kv.account.load_failed(range(num_tokens, kv.remote.num_tokens))

    def started(self, sequence: Sequence) -> None:
        """Count the cached tokens of a sequence that starts to run, and find the causes of those to compute."""
        kv, account = sequence.kv, sequence.kv.account
        if kv.num_computed > account.num_counted:
            self.totals.cached += account.cached_to(kv.num_computed)
        if account.num_counted < account.num_prompt:
            self._plan(sequence)

    def computed(self, sequence: Sequence, count: int) -> None:
        """Count computed tokens; call this before the sequence's progress is changed.

        Args:
            sequence: a running sequence.
            count: number of tokens after those that have KV.
        """
        computed = self.totals.computed
        for cause, num_tokens in sequence.kv.account.computed(sequence.kv.num_computed, count):
            computed[cause] += num_tokens

    def _plan(self, sequence: Sequence) -> None:
        size, account, sampling = self._allocator.block_tokens, sequence.kv.account, sequence.sampling
        full = (len(sampling.tokens) - 1) // size * size
        usable = min(full, sampling.num_reusable // size * size)
        is_moved = account.num_given > account.num_prompt
        loads = [each for each in (account.failed, account.dearer) if each]
        position, end = account.num_counted, account.num_prompt
        spans: list[tuple[int, ComputeCause]] = []
        while position < end:
            stop = end
            for each in loads:
                if each.start > position:
                    stop = min(stop, each.start)
            if loads and position in account.failed:
                stop, cause = min(stop, account.failed.stop), ComputeCause.LOAD_FAILED
            elif loads and position in account.dearer:
                stop, cause = min(stop, account.dearer.stop), ComputeCause.LOAD_DEARER
            elif position >= full:
                cause = ComputeCause.PARTIAL_BLOCK
            elif position >= usable:
                stop, cause = min(stop, full), ComputeCause.ROWS_REQUESTED
            elif is_moved:
                stop, cause = min(stop, usable), ComputeCause.RESUMED
            else:
                stop = min(stop, usable)
                self._find_missing(sequence, position, stop, spans)
                position = stop
                continue
            position = stop
            spans.append((stop, cause))
        account.plan(spans)

    def _find_missing(self, sequence: Sequence, position: int, end: int, spans: list[tuple[int, ComputeCause]]) -> None:
        """Add the causes of the positions from `position` to `end`, whose blocks a cache could have had."""
        size, index, removed = self._allocator.block_tokens, self._allocator.index, self._allocator.index.removed
        names, former = sequence.kv.names, list[BlockHash]()
        for block in range(position // size, -(-end // size)):
            stop = min(end, (block + 1) * size)
            cause = ComputeCause.EVICTED
            if block >= len(names):  # blocks without names are in no cache
                spans.append((end, ComputeCause.FIRST_SEEN))
                return
            if not index.has_name(names[block]):
                stamp = removed.stamp(names[block])
                if stamp == UNKNOWN and self._former is not None:
                    stamp = removed.stamp(self._former_name(sequence, block, former, self._former))
                if stamp == UNKNOWN:
                    spans.append((end, ComputeCause.FIRST_SEEN))
                    return
                if removed.is_dropped(stamp):
                    cause = ComputeCause.DROPPED
                else:
                    sequence.kv.account.evicted(removed.age(stamp))
            if spans and spans[-1][1] is cause:
                spans[-1] = (stop, cause)
            else:
                spans.append((stop, cause))

    def _former_name(
        self, sequence: Sequence, block: int, former: list[BlockHash], namer: Callable[[str], BlockNamer]
    ) -> BlockHash:
        """Return the name that a block had before the weights changed.

        Args:
            sequence: the sequence.
            block: number of the block.
            former: such names of the leading blocks; extended to this block.
            namer: returns the namer of a scope for the weights before the change.
        """
        size = self._allocator.block_tokens
        rest = sequence.sampling.tokens[len(former) * size : (block + 1) * size]
        former += namer(sequence.request.scope).chain(rest, former[-1] if former else None)
        return former[block]
