"""Places of samples: each is held by one running sample, given back when it ends, and taken again in fair order."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from harness.fakes.scripted_gateway import ScriptedGateway, scripted_gateway
from harness.waiting import eventually

from kvferry.gateway.admission import flow_gate

CHAT, TEXT, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


class Places:
    """A gateway with one worker of role `both`, which makes a token for each permit."""

    def __init__(self, scripted: ScriptedGateway, http: httpx.AsyncClient) -> None:
        self.scripted, self.http = scripted, http
        self.permits = asyncio.Semaphore(0)
        self.num_running = self.most_running = 0
        self.ended: list[str] = []
        self.worker = scripted.workers.both[0]
        self.worker.step = self._step

    async def _step(self) -> None:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await self.permits.acquire()
        finally:
            self.num_running -= 1

    @property
    def controller(self) -> Any:
        return self.scripted.gateway.gate.controller

    def begin(self, name: str, path: str = TEXT, **fields: Any) -> "asyncio.Task[httpx.Response]":
        """Send a request; its name is added to `ended` when it has ended."""
        body = fields if path == VECTORS else {"prompt": "a", "max_tokens": 1, "ignore_eos": True, **fields}

        async def post() -> httpx.Response:
            answer = await self.http.post(path, json=body)
            self.ended.append(name)
            return answer

        return asyncio.create_task(post(), name=name)

    def allow(self, count: int) -> None:
        for _ in range(count):
            self.permits.release()

    async def until(self, holds: Callable[[], bool]) -> None:
        await eventually(holds)


@asynccontextmanager
async def places(room: int, **settings: Any) -> AsyncIterator[Places]:
    async with scripted_gateway(prefill=0, decode=0, both=1, **settings) as scripted:
        scripted.workers.both[0].max_sequences = room
        await eventually(lambda: scripted.gateway.gate.report()["sequences"]["bound"] == room)  # type: ignore[index]
        async with httpx.AsyncClient(base_url=scripted.url, timeout=30) as http:
            made = Places(scripted, http)
            yield made
            made.allow(10_000)
            await scripted.idle()
            controller = made.controller
            assert not controller.is_waited_for
            assert (controller.num_dispatched, controller.num_sequences, controller.prefill_tokens) == (0, 0, 0)
            assert controller.num_flows == 0
            assert all(account.num_open == 0 for account in scripted.gateway.gate.quotas.accounts.values())


async def test_samples_do_not_exceed_the_room() -> None:
    async with places(3) as made:
        task = made.begin("many", n=9)
        await made.until(lambda: made.num_running == 3)
        assert made.controller.num_sequences == 3
        made.allow(9)
        answer = await task
        assert sorted(choice["index"] for choice in answer.json()["choices"]) == list(range(9))
        assert made.most_running == 3


async def test_a_small_request_of_the_same_tenant_takes_the_next_free_place() -> None:
    async with places(2) as made:
        many = made.begin("many", n=8)
        await made.until(lambda: made.num_running == 2)
        small = made.begin("small")
        await made.until(lambda: made.controller.num_queued == 1)
        made.allow(1)
        await made.until(lambda: not made.controller.num_queued)
        made.allow(2)
        await small
        assert made.ended == ["small"]
        made.allow(8)
        assert (await many).status_code == 200


async def test_prompts_of_a_request_take_turns_with_other_requests() -> None:
    async with places(1) as made:
        many = made.begin("many", prompt=[f"prompt {number}" for number in range(6)])
        await made.until(lambda: made.num_running == 1)
        small = [made.begin(f"small {number}") for number in range(3)]
        await made.until(lambda: made.controller.num_queued == 3)
        made.allow(4)
        await asyncio.gather(*small)
        assert "many" not in made.ended
        made.allow(6)
        texts = [choice["text"] for choice in (await many).json()["choices"]]
        assert len(texts) == 6


async def test_samples_that_have_waited_for_long_are_served_in_order_of_arrival(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flow_gate, "_UNREAD_SECONDS", 0.05)
    monkeypatch.setattr(flow_gate, "_PATIENCE_SECONDS", 0.05)
    async with places(1) as made:
        many = made.begin("many", n=2)
        await made.until(lambda: made.num_running == 1)
        small = made.begin("small")
        await made.until(lambda: made.controller.num_queued == 1)
        (slot,) = made.scripted.gateway.gate._slots
        await made.until(lambda: slot.waiting is not None and slot.waiting.rank == 0)
        made.allow(2)
        await many
        assert made.ended == ["many"]
        made.allow(1)
        await small


async def test_a_tenants_requests_are_served_in_order_of_arrival_by_option() -> None:
    async with places(1, is_small_first=False) as made:
        many = made.begin("many", n=6)
        await made.until(lambda: made.num_running == 1)
        small = made.begin("small")
        await made.until(lambda: made.controller.num_queued == 1)
        made.allow(6)
        assert (await many).status_code == 200
        assert made.ended == ["many"]
        made.allow(1)
        await small


async def test_inputs_of_embeddings_hold_one_place_each() -> None:
    async with places(2) as made:
        many = made.begin("many", VECTORS, input=[f"input {number}" for number in range(40)])
        await made.until(lambda: made.num_running == 2)
        small = made.begin("small")
        await made.until(lambda: made.controller.num_queued == 1)
        made.allow(4)
        await small
        assert made.ended == ["small"]
        made.allow(40)
        assert len((await many).json()["data"]) == 40
        assert made.most_running == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_gives_back_all_places(stream: bool) -> None:
    async with places(2) as made:
        many = made.begin("many", n=8, stream=stream)
        await made.until(lambda: made.num_running == 2)
        many.cancel()
        await made.until(lambda: not made.controller.num_sequences and not made.controller.is_waited_for)
        small = made.begin("small")
        made.allow(4)
        assert (await small).status_code == 200


async def test_a_failed_sample_ends_the_request_and_its_waiting_samples() -> None:
    async with places(2) as made:
        many = made.begin("many", n=8, prompt="a" * 600)
        assert (await many).status_code == 400
        assert made.controller.num_sequences == 0


async def test_a_request_whose_output_is_not_read_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_gate, "_UNREAD_SECONDS", 0.05)
    async with places(1) as made:
        slots = made.scripted.gateway.gate._slots
        unread = made.begin("unread", max_tokens=4, stream=True)
        await made.until(lambda: made.num_running == 1)
        (slot,) = slots
        monkeypatch.setattr(type(slot), "taken", lambda _: None)  # as if the first part were not sent
        made.allow(1)
        await made.until(lambda: slot.handed_out_at is not None)
        small = made.begin("small")
        await made.until(lambda: made.num_running == 2)
        assert made.controller.num_sequences == 1
        made.allow(8)
        await asyncio.gather(unread, small)
