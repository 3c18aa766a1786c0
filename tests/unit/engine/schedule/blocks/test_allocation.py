"""Block tables: worked examples of the PagedAttention paper and of vLLM's design."""

import pytest

from kvferry.core.errors import InvariantBroken
from kvferry.core.hashing import BlockNamer
from kvferry.core.ids import BlockId
from kvferry.engine.schedule.blocks.allocation import Allocator
from kvferry.engine.schedule.blocks.block_pool import BlockPool
from kvferry.engine.schedule.blocks.block_table import BlockTable
from kvferry.engine.schedule.blocks.cached_prefix import CachedPrefix
from kvferry.engine.schedule.blocks.prefix_index import PrefixIndex


def allocator(num_blocks: int, block_tokens: int, free_order: list[int] | None = None) -> Allocator:
    index = PrefixIndex()
    pool = BlockPool(num_blocks, on_reuse=index.forget, free_order=free_order)
    return Allocator(pool, index, block_tokens=block_tokens)


def filled(table: BlockTable, num_tokens: int, block_tokens: int) -> list[tuple[int, int]]:
    """Return (physical block, filled slots) for each block of a table, as in the figures of the paper."""
    return [(b, min(block_tokens, num_tokens - i * block_tokens)) for i, b in enumerate(table.blocks)]


def test_a_table_grows_block_by_block_as_in_the_papers_figure() -> None:
    # Kwon et al., PagedAttention, figure 6: seven prompt tokens, then two decode steps, B = 4.
    alloc = allocator(9, 4, free_order=[7, 1, 3, 5, 2, 0, 4, 6, 8])
    table = BlockTable()
    assert alloc.grow(table, num_tokens=7)
    assert filled(table, 7, 4) == [(7, 4), (1, 3)]
    assert alloc.grow(table, num_tokens=8)
    assert filled(table, 8, 4) == [(7, 4), (1, 4)]
    assert alloc.grow(table, num_tokens=9)
    assert filled(table, 9, 4) == [(7, 4), (1, 4), (3, 1)]


def test_two_requests_share_a_pool_without_sharing_blocks() -> None:
    # The same paper, figure 7.
    alloc = allocator(9, 4, free_order=[7, 1, 5, 2, 3, 0, 4, 6, 8])
    a, b = BlockTable(), BlockTable()
    alloc.grow(a, num_tokens=7)
    alloc.grow(b, num_tokens=6)
    assert filled(b, 6, 4) == [(5, 4), (2, 2)]
    assert not set(a.blocks) & set(b.blocks)


@pytest.mark.parametrize(("num_tokens", "block_tokens", "blocks"), [(17, 16, 2), (10, 4, 3), (16, 16, 1), (0, 4, 0)])
def test_blocks_needed_round_up(num_tokens: int, block_tokens: int, blocks: int) -> None:
    assert allocator(4, block_tokens).blocks_for(num_tokens) == blocks


def test_growth_that_does_not_fit_changes_nothing() -> None:
    alloc = allocator(2, 4)
    table = BlockTable()
    assert not alloc.grow(table, num_tokens=9)
    assert table.blocks == []
    assert alloc.pool.is_idle


def test_freeing_a_table_twice_is_harmless() -> None:
    alloc = allocator(2, 4)
    table = BlockTable()
    alloc.grow(table, num_tokens=4)
    alloc.free(table)
    alloc.free(table)
    assert alloc.pool.is_idle


def test_a_full_prompt_hit_leaves_at_least_one_token_to_compute() -> None:
    alloc = allocator(8, 4)
    namer = BlockNamer(tenant=b"t", fingerprint=b"f", block_tokens=4)
    tokens = list(range(8))
    table = BlockTable()
    alloc.grow(table, num_tokens=8)
    for i, name in enumerate(namer.chain(tokens)):
        alloc.index.add(name, tokens[i * 4 : i * 4 + 4], table.blocks[i])
    assert alloc.peek(namer.chain(tokens), tokens, max_tokens=7).blocks == table.blocks[:1]
    assert alloc.peek(namer.chain(tokens), tokens, max_tokens=8).blocks == table.blocks


def test_a_block_name_with_other_tokens_is_no_hit() -> None:
    alloc = allocator(8, 4)
    namer = BlockNamer(tenant=b"t", fingerprint=b"f", block_tokens=4)
    table = BlockTable()
    alloc.grow(table, num_tokens=4)
    name = namer.name(None, [1, 2, 3, 4])
    alloc.index.add(name, [1, 2, 3, 4], table.blocks[0])
    assert alloc.peek([name], [1, 2, 3, 5, 9], max_tokens=4).blocks == []


def test_a_prefix_is_held_only_by_an_empty_table() -> None:
    alloc = allocator(4, 4)
    table = BlockTable()
    alloc.grow(table, num_tokens=4)
    with pytest.raises(InvariantBroken, match="prefix"):
        alloc.hold(table, CachedPrefix([BlockId(1)]))


def test_a_page_is_named_once_in_each_life() -> None:
    index = PrefixIndex()
    namer = BlockNamer(tenant=b"t", fingerprint=b"f", block_tokens=2)
    one, two = namer.name(None, [1, 2]), namer.name(None, [3, 4])
    assert index.add(one, [1, 2], BlockId(0))
    assert not index.add(one, [1, 2], BlockId(1)), "a name keeps its first page"
    with pytest.raises(InvariantBroken, match="already has a name"):
        index.add(two, [3, 4], BlockId(0))
    index.forget(BlockId(0))
    index.forget(BlockId(0))
    assert len(index) == 0


def test_integrity_notices_a_cached_block_in_quarantine() -> None:
    alloc = allocator(2, 2)
    table = BlockTable()
    alloc.grow(table, num_tokens=2)
    alloc.index.add(BlockNamer(tenant=b"", fingerprint=b"", block_tokens=2).name(None, [1, 2]), [1, 2], table.blocks[0])
    alloc.pool.begin_write(table.blocks)
    alloc.free(table)
    with pytest.raises(InvariantBroken, match="prefix index"):
        alloc.check_integrity()
