"""Two turns of an agent over the Messages API: a nonce that changes with each request costs no cached block."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from harness.servers.processes import RunningProcess, running

BLOCK = 16
RULES = "You are an agent that edits files. " * 20
TOOLS = [
    {
        "name": name,
        "description": f"Does {name} with a file.",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    }
    for name in ("read", "write")
]


@pytest.fixture(scope="module")
def stack() -> Iterator[RunningProcess]:
    flags = ("--model", "tiny", "--dtype", "float32", "--threads", "1", "--log-level", "error")
    with running("up", *flags, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--json") as process:
        process.wait_for("ready")
        yield process
        assert process.stop() == 0


def two_turns(stack: RunningProcess, headers: tuple[str, str]) -> float:
    """Send two turns of a conversation; return the share of the first prompt's blocks that the second turn reads from
    the cache.

    Args:
        stack: the running stack.
        headers: first system block of each turn.
    """
    mark = {"cache_control": {"type": "ephemeral"}}
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Read a.txt.", **mark}]}]
    usages = []
    with httpx.Client(base_url=f"http://{stack.events['ready']['http']}", timeout=60.0) as client:
        for header in headers:
            body = {
                "system": [{"type": "text", "text": header}, {"type": "text", "text": RULES, **mark}],
                "messages": messages,
                "tools": TOOLS,
                "max_tokens": 20,
                "temperature": 0,
                "seed": 1,
            }
            whole = client.post("/v1/messages?beta=true", json=body).raise_for_status().json()
            usages.append(whole["usage"])
            text = [{"type": "text", "text": "Now b.txt.", **mark}]
            del messages[-1]["content"][0]["cache_control"]  # the mark moves to the last message
            answer = whole["content"] or "nothing"
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": text}]
    first = sum(usages[0][f"{kind}input_tokens"] for kind in ("", "cache_read_", "cache_creation_"))
    assert first > 40 * BLOCK
    return usages[1]["cache_read_input_tokens"] / (first // BLOCK * BLOCK)


def nonces(form: str) -> tuple[str, str]:
    return form.format("36ee5"), form.format("0aaa9")


def test_a_new_nonce_costs_no_block(stack: RunningProcess) -> None:
    form = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={};"
    assert two_turns(stack, nonces(form)) >= 0.99


def test_other_text_that_changes_at_the_front_costs_all_blocks(stack: RunningProcess) -> None:
    assert two_turns(stack, nonces("session {}")) < 0.1
