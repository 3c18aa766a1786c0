"""Streams whose gateway is killed: clients that come back to another gateway get the rest of the same answer."""

import json
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.idle import assert_workers_idle
from harness.servers.gateway_pool import SECONDS, GatewayPool, gateway_pool, http, metric
from harness.servers.processes import RunningProcess
from harness.waiting import until

PAGE = Path(__file__).parents[2] / "docs" / "resuming.md"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "numbers": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "numbers"],
    "additionalProperties": False,
}
LONG: dict[str, Any] = {"max_tokens": 1200, "ignore_eos": True}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "Say something long."}]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, {"prompt": "abcdef" * 9, "temperature": 0, **LONG}),
    "seeded": (COMPLETIONS, {"prompt": "abcdef" * 9, "seed": 7, **LONG}),
    "logprobs": (COMPLETIONS, {"prompt": "abc", "seed": 8, "logprobs": 2, **LONG}),
    "penalties": (COMPLETIONS, {"prompt": "abc", "seed": 9, "frequency_penalty": 0.5, "min_tokens": 300, **LONG}),
    "stop": (COMPLETIONS, {"prompt": "abc", "seed": 3, "stop": ["zq", "qz"], **LONG}),
    "chat": (CHAT, {"messages": HI, "seed": 4, "stream_options": {"include_usage": True}, **LONG}),
    "grammar": (
        CHAT,
        {
            "messages": HI,
            "seed": 5,
            "max_tokens": 300,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        },
    ),
}

Stream = Callable[..., Iterator[Any]]


def recipe() -> Stream:
    """Return the client of the documentation."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    found: Stream = names["stream"]
    return found


@pytest.fixture(scope="module")
def pool() -> Iterator[GatewayPool]:
    with gateway_pool() as started:
        yield started


@pytest.fixture(scope="module")
def lasting(pool: GatewayPool) -> Iterator[RunningProcess]:
    """A gateway that is not killed."""
    with pool.gateway() as process:
        yield process


def text_of(events: Sequence[Any]) -> dict[str, Any]:
    """Return what a client has after the events, without what differs between two requests."""
    whole: dict[str, Any] = {"text": "", "logprobs": [], "finish": [], "usage": None, "ids": set()}
    for event in events:
        whole["ids"].add(event["id"])
        whole["usage"] = event.get("usage") or whole["usage"]
        for choice in event["choices"]:
            whole["text"] += (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
            if choice.get("logprobs"):
                names = ("tokens", "token_logprobs", "text_offset")
                whole["logprobs"] += zip(*(choice["logprobs"][name] for name in names), strict=True)
            if choice["finish_reason"]:
                whole["finish"].append(choice["finish_reason"])
    assert len(whole.pop("ids")) == 1, "one answer has one id"
    if whole["usage"]:  # the prompt may be cached the second time
        whole["usage"] = {name: whole["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return whole


@pytest.fixture(scope="module")
def uncut(lasting: RunningProcess) -> dict[str, list[Any]]:
    """The events of all requests, at a gateway that is not killed."""
    stream = recipe()
    return {kind: list(stream([http(lasting) + path], body, {})) for kind, (path, body) in REQUESTS.items()}


@pytest.mark.parametrize("position", [1, 25, 150])
def test_a_killed_gateway_costs_no_token(
    pool: GatewayPool, lasting: RunningProcess, uncut: dict[str, list[Any]], position: int
) -> None:
    stream, before = recipe(), reconnections(lasting)
    got: dict[str, list[Any]] = {kind: [] for kind in REQUESTS}

    def follow(kind: str) -> None:
        path, body = REQUESTS[kind]
        for event in stream([http(victim) + path, http(lasting) + path], body, {"x-request-id": f"{kind}-{position}"}):
            got[kind].append(event)
            if sum(map(len, got.values())) > position * len(REQUESTS):
                victim.process.kill()

    with pool.gateway() as victim, ThreadPoolExecutor(len(REQUESTS)) as threads:
        for done in [threads.submit(follow, kind) for kind in REQUESTS]:
            done.result(SECONDS)
        assert victim.process.wait(SECONDS) == -signal.SIGKILL
    for kind in REQUESTS:
        assert text_of(got[kind]) == text_of(uncut[kind]), kind
    assert reconnections(lasting) - before >= 1, "streams were cut"
    assert_workers_idle([str(pool.worker.events["listening"]["admin"])])


def reconnections(process: RunningProcess) -> float:
    outcomes = ("continued", "recomputed", "replayed")
    return sum(metric(process, f'kvferry_gateway_reconnections_total{{outcome="{one}"}}') for one in outcomes)


def test_an_answer_without_a_seed_continues_with_the_seed_that_was_drawn(
    pool: GatewayPool, lasting: RunningProcess
) -> None:
    stream, body = recipe(), {"prompt": "abc", **LONG}
    got = []
    with pool.gateway() as victim:
        for event in stream([http(victim) + COMPLETIONS, http(lasting) + COMPLETIONS], body, {}):
            got.append(event)
            if len(got) == 30:
                victim.process.kill()
                victim.process.wait(SECONDS)
    # Another client that has only the first event gets the same answer.
    content = json.dumps(body | {"stream": True})
    headers = {"content-type": "application/json"}
    with httpx.stream("POST", http(lasting) + COMPLETIONS, content=content, headers=headers, timeout=SECONDS) as answer:
        ids = [line.removeprefix("id: ") for line in answer.iter_lines() if line.startswith("id: ")]
    assert text_of(got)["finish"] == ["length"]
    assert len(set(ids)) == len(ids), "each event has an id of its own"


def test_streams_that_outlast_the_drain_continue_elsewhere(
    pool: GatewayPool, lasting: RunningProcess, uncut: dict[str, list[Any]]
) -> None:
    path, body = REQUESTS["seeded"]
    got = []
    with pool.gateway("", "--drain-seconds", "0.1") as victim:
        for event in recipe()([http(victim) + path, http(lasting) + path], body, {}):
            got.append(event)
            if len(got) == 5:
                victim.process.terminate()
        assert victim.process.wait(SECONDS) == 0
    assert text_of(got) == text_of(uncut["seeded"])


def test_the_quota_that_a_killed_gateway_used_is_others_again(pool: GatewayPool, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text("[default]\nconcurrent_requests = 1\n")
    body = {"prompt": "abc", "max_tokens": 1, "temperature": 0}
    with pool.gateway("", "--tenants", str(tenants)) as other, pool.gateway("", "--tenants", str(tenants)) as victim:

        def status() -> int:
            return httpx.post(f"{http(other)}{COMPLETIONS}", json=body, timeout=SECONDS).status_code

        long = {"prompt": "abc", "stream": True, "max_tokens": 4000, "ignore_eos": True}
        with httpx.stream("POST", f"{http(victim)}{COMPLETIONS}", json=long, timeout=SECONDS) as answer:
            next(answer.iter_lines())
            victim.process.send_signal(signal.SIGSTOP)  # the stream does not end before the other one is asked
            assert status() == 429, "the only request that the tenant may have open is at the victim"
            victim.process.kill()
        until(lambda: status() == 200, "its lease has ended")
    assert_workers_idle([str(pool.worker.events["listening"]["admin"])])
