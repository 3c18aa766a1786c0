"""The longest cached prefix over groups of layers, against a search of all lengths."""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.ids import BlockId
from kvferry.engine.schedule.blocks.cached_prefix import NO_PAGE, longest_prefix

Cached = list[set[int]]


@st.composite
def caches(draw: st.DrawFn) -> tuple[list[int | None], int, int, Cached]:
    """Windows, tokens per block, number of blocks, and the blocks that each group has."""
    windows = draw(st.lists(st.one_of(st.none(), st.integers(1, 20)), min_size=1, max_size=3))
    limit = draw(st.integers(0, 12))
    lacking = st.sets(st.integers(0, 12), max_size=3)
    cached = [set(range(draw(st.integers(0, 13)))) - draw(lacking) for _ in windows]
    return windows, draw(st.integers(1, 4)), limit, cached


def blocks_read(length: int, window: int | None, block_tokens: int) -> set[int]:
    """Blocks of which the first row after `length` blocks reads a token."""
    position = length * block_tokens
    first = 0 if window is None else max(0, position - window + 1)
    return {token // block_tokens for token in range(first, position)}


@given(caches())
def test_it_is_the_longest_of_which_every_group_has_what_the_next_row_reads(
    case: tuple[list[int | None], int, int, Cached],
) -> None:
    windows, block_tokens, limit, cached = case
    looked_up: list[tuple[int, int]] = []

    def page(group: int, block: int) -> BlockId | None:
        looked_up.append((group, block))
        return BlockId(100 * group + block) if block in cached[group] else None

    found = longest_prefix(windows, block_tokens, limit, page)
    usable = [
        length
        for length in range(limit + 1)
        if all(blocks_read(length, w, block_tokens) <= has for w, has in zip(windows, cached, strict=True))
    ]
    assert len(found) == max(usable)
    for group, (pages, window) in enumerate(zip((found.blocks, *found.further), windows, strict=True)):
        read = blocks_read(len(found), window, block_tokens)
        assert pages == [100 * group + i if i in read else NO_PAGE for i in range(len(found))]
        assert found.passed[group] == len(found) - len(read)
    assert len(looked_up) == len(set(looked_up))


def test_known_pages_of_the_first_group_are_not_looked_up() -> None:
    def page(group: int, block: int) -> BlockId | None:
        assert group == 1
        return BlockId(50 + block)

    found = longest_prefix([None, 3], 2, 4, page, [BlockId(i) for i in (9, 8, 7, 6)])
    assert found.blocks == [9, 8, 7, 6]
    assert found.further == ([NO_PAGE, NO_PAGE, NO_PAGE, 53],)
    assert found.pages == [9, 8, 7, 6, 53]
