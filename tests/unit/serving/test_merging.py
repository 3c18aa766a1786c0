import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from kvferry.serving.merging import merge


class Source:
    """A source that counts up, and fails or waits for ever at a given number."""

    def __init__(self, *, limit: int = 100, fails_at: int = -1, hangs_at: int = -1) -> None:
        self.limit, self.fails_at, self.hangs_at = limit, fails_at, hangs_at
        self.made = 0
        self.closed = False

    async def items(self, name: str) -> AsyncGenerator[tuple[str, int], None]:
        try:
            for number in range(self.limit):
                if number == self.fails_at:
                    raise ValueError(name)
                if number == self.hangs_at:
                    await asyncio.Event().wait()
                self.made += 1
                yield name, number
                await asyncio.sleep(0)
        finally:
            self.closed = True


async def test_all_items_come_each_sources_in_order():
    sources = {name: Source(limit=limit) for name, limit in (("a", 5), ("b", 0), ("c", 9))}
    found = [item async for item in merge([s.items(name) for name, s in sources.items()])]
    for name, source in sources.items():
        assert [number for n, number in found if n == name] == list(range(source.limit))
    assert all(source.closed for source in sources.values())


async def test_one_failure_closes_all_sources_and_is_raised():
    good, bad = Source(hangs_at=2), Source(fails_at=3)
    with pytest.raises(ValueError, match="bad"):
        _ = [item async for item in merge([good.items("good"), bad.items("bad")])]
    assert good.closed
    assert bad.closed


async def test_leaving_closes_all_sources():
    sources = [Source(hangs_at=1), Source(hangs_at=1)]
    async with aclosing(merge([s.items("x") for s in sources])) as items:
        await anext(items)
        await anext(items)
    assert all(source.closed for source in sources)


async def test_a_slow_reader_holds_the_sources_back():
    source = Source(limit=1000)
    async with aclosing(merge([source.items("x")])) as items:
        await anext(items)
        for _ in range(50):
            await asyncio.sleep(0)
        assert source.made < 20


async def test_no_sources_merge_to_no_items():
    assert [item async for item in merge([])] == []
