"""Progress reports of a prompt during its prefill: late, early and concurrent subscribers, none after its end."""

import asyncio

from kvferry.core.ids import BlockHash, BlockId, RequestId
from kvferry.engine.schedule.step.kv_jobs import NewBlocks
from kvferry.workers.handoff import prefill_progress as module
from kvferry.workers.handoff.prefill_progress import PrefillProgress


def progress(number: int) -> NewBlocks:
    return NewBlocks(RequestId("r"), (BlockId(number),), (1,), (BlockHash(bytes([number])),))


async def reported_blocks(following: PrefillProgress, name: str) -> list[int]:
    return [progress.blocks[0] async for progress in following.follow(name)]


async def test_subscribers_get_all_reports_whenever_they_subscribe() -> None:
    following = PrefillProgress()
    early = asyncio.create_task(reported_blocks(following, "t"))
    await asyncio.sleep(0)
    with following.computing("t"):
        following.add("t", progress(1))
        late = asyncio.create_task(reported_blocks(following, "t"))
        await asyncio.sleep(0)
        following.add("t", progress(2))
        await asyncio.sleep(0)
        following.add("t", progress(3))
    assert await early == await late == [1, 2, 3]


async def test_an_unknown_prompt_is_done_soon(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(module, "_BEGIN_SECONDS", 0.01)
    assert await reported_blocks(PrefillProgress(), "unknown") == []


async def test_a_subscriber_that_leaves_does_not_affect_the_others() -> None:
    following = PrefillProgress()
    with following.computing("t"):
        for _ in range(10):
            task = asyncio.create_task(reported_blocks(following, "t"))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        whole = asyncio.create_task(reported_blocks(following, "t"))
        await asyncio.sleep(0)
        following.add("t", progress(1))
    assert await whole == [1]


async def test_too_many_subscribers_are_refused() -> None:
    following = PrefillProgress()
    with following.computing("t"):
        tasks = [asyncio.create_task(reported_blocks(following, "t")) for _ in range(module._MAX_FOLLOWERS + 2)]
        await asyncio.sleep(0)
        following.add("t", progress(1))
    found = await asyncio.gather(*tasks)
    assert sorted(map(len, found)) == [0, 0, *[1] * module._MAX_FOLLOWERS]


async def test_a_prompt_without_a_name_or_with_anothers_is_not_followed() -> None:
    following = PrefillProgress()
    with following.computing(""), following.computing("t"), following.computing("t"):
        following.add("", progress(1))
        following.add("unknown", progress(2))
        task = asyncio.create_task(reported_blocks(following, "t"))
        await asyncio.sleep(0)
        following.add("t", progress(3))
    assert await task == [3]
