"""Requests that still run when the drain of a gateway ends: an error in the form of their route, and no traceback."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from harness.fakes.byte_model import byte_model
from harness.fakes.scripted_answers import AnswerSource
from harness.waiting import eventually

from kvferry.gateway.decide.config import HttpConfig
from kvferry.gateway.dispatch.journal import Journal
from kvferry.gateway.http.client_api import ClientApi
from kvferry.gateway.http.server.http_server import HttpServer
from kvferry.gateway.observe.instruments import GatewayInstruments
from kvferry.serving.text_service import TextService
from kvferry.text.answers.registry import CallFormat

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 50, "model": "bytes"},
}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_runs_at_the_end_of_the_drain_ends_with_an_error(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    source = AnswerSource(["It is cold."], held=asyncio.Event())
    service = TextService(source, byte_model(1 << 16, CallFormat.HERMES))
    api = ClientApi(service, HttpConfig(), GatewayInstruments(), lambda: (True, ()), Journal())
    server = await HttpServer.start(api.app(), "127.0.0.1:0", field="http", drain_seconds=0.2)
    async with httpx.AsyncClient(base_url=f"http://{server.address}", timeout=20) as http:
        tasks = {
            path: asyncio.create_task(http.post(path, json={**body, "stream": stream})) for path, body in BODIES.items()
        }
        await eventually(lambda: source.num_open == len(BODIES))
        await server.stop()
        for path, task in tasks.items():
            answer = await task
            if stream:
                assert answer.status_code == 200
                last = answer.text.strip().rpartition("data: ")[2]
                assert "[DONE]" not in answer.text
                assert "retry: 1000" in answer.text.splitlines(), "when a client may come back"
            else:
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), path
                assert answer.headers["x-request-id"]
                last = answer.text
            assert "the gateway is stopping" in json.loads(last)["error"]["message"], path
    assert source.num_open == 0
    assert "Traceback" not in caplog.text
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors == ["Cancel 4 running task(s), timeout graceful shutdown exceeded"], "one line of the server"
