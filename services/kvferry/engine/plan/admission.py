"""Admission control: checks whether a new sequence fits into the free pages that admitted sequences do not need.

    pages   [ held by tables, exports, stores | free, including cached content ]
    free    [ needed by admitted prompts | reserve | for new sequences ]

A prompt that is computed in chunks allocates its pages chunk by chunk, so the pages of later chunks are still free. Two
long prompts that fit one after the other, but not together, would both be admitted and then preempt each other
repeatedly. Therefore all pages for the tokens of an admitted prompt are counted from the start. Pages for tokens to be
generated are not counted: their number is unknown, and preemption handles them (Kwon et al., PagedAttention, section
4.5).
"""

from collections.abc import Iterable

from kvferry.core.ids import BlockId
from kvferry.engine.blocks.allocation import Allocator
from kvferry.engine.plan.sequence import Sequence


def num_lacking(allocator: Allocator, admitted: Iterable[Sequence]) -> int:
    """Return the number of pages that admitted sequences still have to allocate for their current tokens."""
    return sum(allocator.missing(s.table, s.num_tokens) for s in admitted)


def cached_prefix(allocator: Allocator, sequence: Sequence) -> list[BlockId]:
    """Return the pages of the longest cached prefix that a sequence can use, without taking references."""
    return allocator.peek(sequence.name_blocks(), sequence.tokens, max_tokens=sequence.num_reusable)


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
            reserve: number of pages that must stay free if other sequences are admitted.
        """
        self._allocator = allocator
        self._reserve = reserve
        known = tuple(admitted)
        self._has_others = bool(known)
        self._promised = num_lacking(allocator, known)

    def needed(self, hit: list[BlockId], num_tokens: int) -> int:
        """Compute the number of free pages that a sequence needs for all its tokens.

        Args:
            hit: pages of its longest cached prefix; those without a reference are still free, so they are counted too.
            num_tokens: number of current tokens, prompt and generated.
        """
        num_free_hits = sum(1 for block in hit if self._allocator.pool.refs(block) == 0)
        return self._allocator.blocks_for(num_tokens) - len(hit) + num_free_hits

    def fits(self, hit: list[BlockId], num_tokens: int) -> bool:
        """Return whether all tokens of a new sequence fit into the free pages that are not reserved for admitted
        sequences."""
        reserve = self._reserve if self._has_others else 0
        return self.needed(hit, num_tokens) <= self._allocator.pool.num_free - self._promised - reserve

    def admit(self, newcomer: Sequence) -> None:
        """Admit a sequence whose table has the pages of its first chunk; its remaining pages are reserved for it."""
        self._has_others = True
        self._promised += self._allocator.missing(newcomer.table, newcomer.num_tokens)
