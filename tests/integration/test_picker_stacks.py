"""The picker in front of kvferry's own stacks: two `kvferry up` with real engines, behind a real Envoy."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack

import httpx
import pytest
from harness.servers.envoy import EnvoyMode, envoy, envoy_path
from harness.servers.processes import running
from harness.waiting import until

SECONDS = 60.0
pytestmark = pytest.mark.skipif(envoy_path() is None, reason="Envoy is not installed")
UP = (
    "up", "--model", "tiny", "--both", "1", "--prefill", "0", "--decode", "0", "--dtype", "float32", "--threads", "1",
    "--kv-memory", "16MiB", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--batch-folder", "off", "--json",
)  # fmt: skip


@pytest.fixture(scope="module")
def stacks() -> Iterator[list[dict[str, str]]]:
    with ExitStack() as stack:
        started = [stack.enter_context(running(*UP)) for _ in range(2)]
        yield [{name: str(value) for name, value in one.wait_for("ready").items()} for one in started]


async def test_answers_and_events_of_two_stacks_pass_and_their_load_is_read(stacks, tmp_path):
    flags = [flag for one in stacks for flag in ("--endpoints", f"{one['http']}/{one['admin'].rpartition(':')[2]}")]
    async with AsyncExitStack() as stack:
        listen = ("--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--flavor", "kvferry")
        picker = stack.enter_context(running("picker", *listen, *flags))
        bound = await asyncio.to_thread(picker.wait_for, "listening")
        url = await stack.enter_async_context(envoy(str(bound["grpc"]), tmp_path, EnvoyMode(is_tls=True)))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=SECONDS))

        def fresh() -> bool:
            page = httpx.get(f"http://{bound['metrics']}/metrics").text
            return 'kvferry_picker_endpoints{trust="fresh"} 2.0' in page

        await asyncio.to_thread(until, fresh, "both gateways have metrics")
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "hello " * 60}],
            "max_tokens": 8,
            "temperature": 0,
        }
        answers = [await http.post("/v1/chat/completions", json=body) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200] * 3
        cached = answers[-1].json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0, "the same prompt went to the same stack"
        async with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
            events = [line async for line in answer.aiter_lines() if line.startswith("data:")]
        assert events[-1] == "data: [DONE]"
        text = "".join(json.loads(event[5:])["choices"][0]["delta"].get("content") or "" for event in events[:-1])
        assert text == answers[0].json()["choices"][0]["message"]["content"]
