"""The asynchronous API: outputs equal those of the blocking API, concurrent requests, and an idle engine after every
exit.
"""

import asyncio
from contextlib import aclosing

import numpy as np
import pytest
from harness.idle import assert_idle
from harness.waiting import eventually

from kvferry.core.errors import DeadlinePassed, InvalidRequest, Unavailable, UsageError
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine import LLM, AsyncLLM, BeamParams, SamplingParams
from kvferry.engine.offline.completion import CompletionPart

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)
SETTINGS = {"dtype": "float32", "kv_memory": 16 << 20}


@pytest.fixture(scope="module")
def blocking() -> LLM:
    return LLM("tiny", dtype="float32", kv_memory=16 << 20)


async def parts_of(llm: AsyncLLM, prompt: str, sampling: SamplingParams = GREEDY) -> list[CompletionPart]:
    return [part async for part in llm.generate(prompt, sampling)]


async def test_concurrent_requests_have_the_outputs_of_the_blocking_api(blocking: LLM) -> None:
    prompts = ["hello", "a longer prompt", "x"]
    whole = blocking.generate(prompts, GREEDY)
    vector = blocking.encode(["hello"], pooling="mean")[0].embedding
    async with await AsyncLLM.open("tiny", **SETTINGS) as llm:
        *made, embedded = await asyncio.gather(
            *(parts_of(llm, prompt) for prompt in prompts), llm.encode("hello", pooling="mean")
        )
        for parts, expected in zip(made, whole, strict=True):
            assert len(parts) > 1, "the outputs arrive while they are generated"
            assert "".join(part.text for part in parts) == expected.text
            assert tuple(token for part in parts for token in part.token_ids) == expected.token_ids
            assert parts[-1].completion is not None
            assert parts[-1].completion.token_ids == expected.token_ids
            assert [part.completion for part in parts[:-1]] == [None] * (len(parts) - 1)
        np.testing.assert_allclose(embedded.embedding, vector, rtol=1e-5, atol=1e-6)
        messages = [{"role": "user", "content": "hello"}]
        chat = [part async for part in llm.chat(messages, GREEDY)]
        assert chat[-1].completion is not None
        assert chat[-1].completion.text == blocking.chat([messages], GREEDY)[0].text
    assert_idle(llm.engine)


async def test_concurrent_beam_searches_have_the_outputs_of_the_blocking_api(blocking: LLM) -> None:
    prompts = ["hello", "a longer prompt", "x"]
    params = BeamParams(3, max_tokens=6, length_penalty=0.5)
    expected = blocking.beam_search(prompts, params)
    async with await AsyncLLM.open("tiny", **SETTINGS) as llm:
        assert await asyncio.gather(*(llm.beam_search(prompt, params) for prompt in prompts)) == expected
        assert len(await llm.beam_search([1, 2])) == BeamParams().width
        with pytest.raises(InvalidRequest, match="params must be a BeamParams, not dict"):
            await llm.beam_search("x", {"width": 2})  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest):
            await llm.beam_search([1] * (llm.engine.max_model_tokens + 1))
        task = asyncio.create_task(llm.beam_search("hello", BeamParams(8, max_tokens=1500, ignore_eos=True)))
        await eventually(lambda: llm.engine.scheduler.num_running == 8)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await llm.beam_search("hello", params) == expected[0]
    assert_idle(llm.engine)


async def test_cancellation_ends_in_an_idle_engine() -> None:
    async with await AsyncLLM.open("tiny", **SETTINGS) as llm:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in llm.generate("hello", LONG):
                begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The aborted request takes no part in the steps of a later one.
        assert (await parts_of(llm, "later"))[-1].completion is not None
        assert llm.engine.scheduler.num_running == 0
    assert_idle(llm.engine)


async def test_an_iterator_that_is_left_ends_its_request() -> None:
    async with await AsyncLLM.open("tiny", **SETTINGS) as llm:
        async with aclosing(llm.generate("hello", LONG)) as parts:
            async for _ in parts:
                break
        assert (await parts_of(llm, "later"))[-1].completion is not None
    assert_idle(llm.engine)


async def test_a_vector_that_is_cancelled_ends_in_an_idle_engine() -> None:
    limits = SchedulerLimits(max_chunk_tokens=4)
    async with await AsyncLLM.open("tiny", limits=limits, **SETTINGS) as llm:
        task = asyncio.create_task(llm.encode([5] * 1000))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (await llm.encode("later")).embedding.shape == (48,)
    assert_idle(llm.engine)


async def test_closing_ends_open_iterators() -> None:
    llm = await AsyncLLM.open("tiny", **SETTINGS)
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in llm.generate("hello", LONG):
            begun.set()

    task = asyncio.create_task(read())
    await begun.wait()
    await llm.aclose()
    await llm.aclose()
    with pytest.raises(Unavailable):
        await task
    assert_idle(llm.engine)
    with pytest.raises(Unavailable, match="closed"):
        await llm.encode("hello")


async def test_an_llm_without_requests_can_be_closed() -> None:
    llm = AsyncLLM("tiny", **SETTINGS)
    await llm.aclose()
    assert_idle(llm.engine)


async def test_stop_strings_end_the_request(blocking: LLM) -> None:
    text = blocking.generate(["hello"], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))[0].text
    stop = text[3:5]
    params = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True, stop=(stop,))
    async with await AsyncLLM.open("tiny", **SETTINGS) as llm:
        last = (await parts_of(llm, "hello", params))[-1].completion
        assert last is not None
        assert last.stop_reason == stop
        assert last.text == text[: text.index(stop)]
    assert_idle(llm.engine)


async def test_a_bad_request_fails_alone() -> None:
    async with await AsyncLLM.open("tiny", **SETTINGS) as llm:
        for bad in ([], [10**6], [1] * 5000):
            with pytest.raises(InvalidRequest):
                await llm.encode(bad)
        with pytest.raises(InvalidRequest, match="between 1 and 48"):
            await llm.encode("hello", dimensions=0)
        assert (await parts_of(llm, "hello"))[-1].completion is not None
    assert_idle(llm.engine)


async def test_waits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with await AsyncLLM.open("tiny", wait_seconds=0.05, **SETTINGS) as llm:
        monkeypatch.setattr(llm._source._owner, "_hand_out", lambda _: None)  # the engine never answers
        with pytest.raises(DeadlinePassed, match=r"0\.05 s"):
            await llm.encode("hello")
    assert_idle(llm.engine)


def test_a_second_event_loop_is_refused() -> None:
    llm = AsyncLLM("tiny", **SETTINGS)

    async def first() -> None:
        await llm.encode("hello")

    async def second() -> None:
        with pytest.raises(UsageError, match="one event loop"):
            await llm.encode("hello")
        await llm.aclose()

    asyncio.run(first())
    asyncio.run(second())
    assert_idle(llm.engine)
