"""Beam searches at the gateway: each is admitted, charged and recorded as one request of `width` sequences."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.fakes.scripted_gateway import ScriptedGateway, scripted_gateway
from harness.fakes.scripted_worker import Act, Fault
from harness.waiting import eventually

from kvferry.cli.commands.explain import report_lines
from kvferry.gateway.decide.config import RetryConfig

_PROMPT = "four"
_NUM_PROMPT = 5
"""Tokens of the prompt: its bytes, and the token at the beginning."""


class Searches:
    """A gateway with one worker of role `both`, whose steps after the first `num_free` ones wait for `go`."""

    def __init__(self, scripted: ScriptedGateway, http: httpx.AsyncClient) -> None:
        self.scripted = scripted
        self.http = http
        self.go = asyncio.Event()
        self.num_running = self.most_running = self.num_free = 0
        self.worker = scripted.workers.both[0]
        self.worker.step = self._step

    async def _step(self) -> None:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        self.num_free -= 1
        try:
            if self.num_free < 0:
                await self.go.wait()
        finally:
            self.num_running -= 1

    @property
    def controller(self) -> Any:
        return self.scripted.gateway.gate.controller

    async def post(self, **fields: Any) -> httpx.Response:
        body = {"prompt": _PROMPT, "max_tokens": 3, "use_beam_search": True, "best_of": 8, "ignore_eos": True, **fields}
        return await self.http.post("/v1/completions", json=body)

    async def metrics(self) -> dict[str, float]:
        text = (await self.http.get(f"{self.scripted.admin_url}/metrics")).text
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name.removeprefix("kvferry_gateway_"): float(value) for name, _, value in lines}

    async def admin(self, path: str) -> Any:
        return (await self.http.get(self.scripted.admin_url + path)).json()


@asynccontextmanager
async def searches(*, room: int = 1000, **settings: Any) -> AsyncIterator[Searches]:
    async with scripted_gateway(prefill=0, decode=0, both=1, **settings) as scripted:
        scripted.workers.both[0].max_sequences = room
        await eventually(lambda: scripted.gateway.gate.report()["sequences"]["bound"] == room)  # type: ignore[index]
        async with httpx.AsyncClient(base_url=scripted.url, timeout=30) as http:
            made = Searches(scripted, http)
            yield made
            made.go.set()
            await scripted.idle()
            controller = made.controller
            assert (controller.num_dispatched, controller.num_sequences, controller.num_beams) == (0, 0, 0)
            assert controller.prefill_tokens == 0
            assert all(account.num_open == 0 for account in scripted.gateway.gate.quotas.accounts.values())


async def test_a_search_holds_half_of_the_room_of_workers_of_both_roles() -> None:
    async with searches(room=4) as made:
        tasks = [asyncio.create_task(made.post())]
        await eventually(lambda: made.controller.num_dispatched == 1)
        assert made.controller.num_beams == 8
        tasks += [asyncio.create_task(made.post(use_beam_search=None, best_of=1)) for _ in range(3)]
        tasks.append(asyncio.create_task(made.post()))
        await eventually(lambda: made.controller.num_queued == 2)
        assert (made.controller.num_dispatched, made.controller.num_sequences) == (3, 2)
        made.go.set()
        assert [(await one).status_code for one in tasks] == [200] * 5
        assert (await made.metrics())['tenant_requests_total{outcome="admitted",tenant="default"}'] == 5


async def test_steps_of_admitted_searches_are_not_refused_for_streams() -> None:
    async with searches(max_streams=8) as made:
        made.num_free = 1
        tasks = [asyncio.create_task(made.post()) for _ in range(3)]
        await eventually(lambda: made.controller.num_queued == 2 and made.num_running == 8)
        assert made.scripted.gateway.dispatcher.open_streams == 8
        made.go.set()
        assert [(await one).status_code for one in tasks] == [200, 200, 200]
        assert made.most_running == 8


async def test_a_search_of_more_beams_than_max_streams_runs_alone() -> None:
    async with searches(max_streams=3) as made:
        made.go.set()
        assert (await made.post()).status_code == 200


async def test_searches_of_several_prompts_take_turns() -> None:
    async with searches() as made:
        made.num_free = 2
        task = asyncio.create_task(made.post(prompt=[f"{number:04}" for number in range(5)]))
        await eventually(lambda: made.num_running == 16)
        assert made.controller.num_beams == 16
        made.go.set()
        assert len((await task).json()["choices"]) == 5
        steps = [tuple(call.token_ids)[:_NUM_PROMPT] for call in made.worker.decodes]
        lasts = {prompt: number for number, prompt in enumerate(steps)}
        for number in range(len(steps)):
            begun = set(steps[: number + 1])
            assert sum(lasts[prompt] >= number for prompt in begun) <= 2, "two searches at a time"


async def test_steps_leave_half_of_the_worker_to_other_prompts() -> None:
    async with searches(room=8) as made:
        made.num_free = 1
        task = asyncio.create_task(made.post())
        turns = made.scripted.gateway.dispatcher._step_turns
        await eventually(lambda: made.num_running == 4 and turns.num_waiting == 4)
        made.go.set()
        assert (await task).status_code == 200


async def test_the_tokens_of_all_beams_are_charged() -> None:
    async with searches() as made:
        made.go.set()
        answer = (await made.post(n=2)).json()
        assert answer["usage"]["completion_tokens"] == 8 * 3
        assert answer["usage"]["prompt_tokens"] == _NUM_PROMPT
        metrics = await made.metrics()
        assert metrics['tenant_tokens_total{kind="output",tenant="default"}'] == 8 * 3
        assert metrics["output_tokens_total"] == 8 * 3
        assert metrics['tenant_tokens_total{kind="prompt",tenant="default"}'] == 8 * _NUM_PROMPT
        account = made.scripted.gateway.gate.quotas.accounts[""]
        assert account.output_tokens < 256, "the length of an output is learned, not the tokens of all beams"


async def test_a_search_is_charged_to_the_share_of_its_tenant_with_recomputed_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with searches() as made:
        made.go.set()
        charged: list[float] = []
        finish = made.controller.finish

        def noted(entry: Any, used: float) -> None:
            charged.append(used)
            finish(entry, used)

        monkeypatch.setattr(made.controller, "finish", noted)
        assert (await made.post()).status_code == 200
        # Two tokens are cached at each step of the scripted worker: the second round computes 4 tokens of each beam,
        # and the third one 5, of which one is the beam's new one.
        assert charged == [_NUM_PROMPT - 2 + 8 * 3 + 8 * 3 + 8 * 4]


async def test_a_search_that_its_client_leaves_is_charged_for_its_rounds() -> None:
    async with searches() as made:
        task = asyncio.create_task(made.post(max_tokens=400))
        made.go.set()
        await eventually(lambda: len(made.worker.decodes) > 20)
        task.cancel()
        await eventually(lambda: made.controller.num_dispatched == 0)
        charged = (await made.metrics())['tenant_tokens_total{kind="output",tenant="default"}']
        assert 8 * 2 <= charged < 8 * 400


async def test_an_expected_search_counts_its_beams_in_quotas(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text("[default]\ntokens_per_minute = 1000\ntoken_burst = 1000\n")
    async with searches(tenants_file=file) as made:
        task = asyncio.create_task(made.post(max_tokens=100))
        await eventually(lambda: made.controller.num_dispatched == 1)
        tokens = made.scripted.gateway.gate.quotas.accounts[""].tokens
        assert tokens is not None
        assert tokens.level == pytest.approx(1000 - 8 * (_NUM_PROMPT + 100), abs=1)
        made.go.set()
        assert (await task).status_code == 200


# -- records -----------------------------------------------------------------------------------------------------------


async def test_a_search_has_one_record_and_is_one_stream_in_the_metrics() -> None:
    async with searches() as made:
        made.go.set()
        answer = await made.post(n=2, max_tokens=40)
        name = answer.headers["x-request-id"]
        (sample,) = (await made.admin(f"/debug/requests/{name}"))["tenants"][0]["samples"]
        counts = sample["beam_width"], sample["outcome"], sample["prompt_tokens"], sample["output_tokens"]
        assert counts == (8, "done", _NUM_PROMPT, 8 * 40)
        assert sample["timing"]["total_seconds"] > sample["timing"]["first_token_seconds"] > 0
        assert len(sample["routes"]) == 1
        assert report_lines(name, sample)[0] == f"{name}  beam search of 8 beams  done"
        (listed,) = (await made.admin("/debug/requests"))["requests"]
        assert (listed["num_samples"], listed["beam_width"], listed["output_tokens"]) == (1, 8, 320)
        metrics = await made.metrics()
        for name in ("time_to_first_token_seconds_count", "stream_seconds_count", 'streams_total{outcome="done"}'):
            assert metrics[name] == 1, name
        assert metrics["inter_token_seconds_count"] == 0
        assert metrics["prompt_tokens_total"] == _NUM_PROMPT


async def test_a_step_whose_worker_fails_is_repeated_and_recorded() -> None:
    async with searches() as made:
        made.go.set()
        made.worker.faults["decode"].extend([None, None, Fault(Act.FAIL)])
        answer = await made.post()
        assert answer.status_code == 200
        (sample,) = (await made.admin(f"/debug/requests/{answer.headers['x-request-id']}"))["tenants"][0]["samples"]
        assert sample["outcome"] == "done"
        assert sample["error"]
        assert len(sample["routes"]) == 3


async def test_the_deadline_of_a_search_counts_the_tokens_of_its_beams() -> None:
    async with searches(retry=RetryConfig(request_timeout_seconds=0.5)) as made:
        made.num_free = 1
        answer = await made.post(max_tokens=100)
        assert answer.status_code == 504
        assert re.search(r"after \d of 100 tokens of each beam", answer.json()["error"]["message"])
        (listed,) = (await made.admin("/debug/requests"))["requests"]
        assert listed["outcome"] == "failed"
