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
from kvferry.engine.schedule.step.sequence import Sequence

_UNKNOWN = (ComputeCause.FIRST_SEEN, 0.0)


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
        kv = sequence.kv
        self.totals.cached += kv.account.cached_to(kv.num_computed)
        if kv.account.num_counted < kv.account.num_prompt:
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
        size, account = self._allocator.block_tokens, sequence.kv.account
        full = (sequence.num_tokens - 1) // size * size
        usable = min(full, sequence.sampling.num_reusable // size * size)
        is_moved = account.num_given > account.num_prompt
        position, end = account.num_counted, account.num_prompt
        spans: list[tuple[int, ComputeCause]] = []
        evicted_seconds = 0.0
        former: list[BlockHash] = []
        while position < end:
            if position in account.failed:
                stop, cause = account.failed.stop, ComputeCause.LOAD_FAILED
            elif position in account.dearer:
                stop, cause = account.dearer.stop, ComputeCause.LOAD_DEARER
            elif position >= full:
                stop, cause = end, ComputeCause.PARTIAL_BLOCK
            elif position >= usable:
                stop, cause = full, ComputeCause.ROWS_REQUESTED
            elif is_moved:
                stop, cause = usable, ComputeCause.RESUMED
            else:
                block = position // size
                cause, seconds = self._missing(sequence, block, former)
                stop = usable if cause is ComputeCause.FIRST_SEEN else (block + 1) * size
                if cause is ComputeCause.EVICTED:
                    evicted_seconds = evicted_seconds or seconds
            starts = [each.start for each in (account.failed, account.dearer) if each and each.start > position]
            position = min(stop, end, *starts)
            spans.append((position, cause))
        account.plan(spans, evicted_seconds)

    def _missing(self, sequence: Sequence, block: int, former: list[BlockHash]) -> tuple[ComputeCause, float]:
        """Return why a block is missing, and the seconds since its removal.

        Args:
            sequence: the sequence.
            block: number of the block.
            former: names of the leading blocks before the weights changed; extended as needed.
        """
        index, name = self._allocator.index, sequence.name_blocks()[block]
        if index.has_name(name):
            return ComputeCause.EVICTED, 0.0
        found = index.removed.find(name)
        if found is None and self._former is not None:
            size, tokens = self._allocator.block_tokens, sequence.sampling.tokens
            namer = self._former(sequence.request.scope)
            rest = tokens[len(former) * size : (block + 1) * size]
            former += namer.chain(rest, former[-1] if former else None)
            found = index.removed.find(former[block])
        if found is None:
            return _UNKNOWN
        is_dropped, seconds = found
        return ComputeCause.DROPPED if is_dropped else ComputeCause.EVICTED, seconds
