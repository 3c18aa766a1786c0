"""System blocks that hold a client's version and nonce are kept out of prompts and logs."""

import logging
from typing import Any

import httpx
import pytest
from harness.fakes.scripted_answers import answering_api

from kvferry.text.answers.registry import CallFormat

HEADER = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;"
RULES = "You are an agent."


async def prompt_of(system: Any) -> str:
    async with answering_api(CallFormat.HERMES) as api, httpx.AsyncClient(base_url=api.url) as http:
        api.source.answers = ["yes"]
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "system": system}
        assert (await http.post("/messages", json=body)).status_code == 200
        return api.source.prompt


def text(*blocks: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": block} for block in blocks]


@pytest.mark.parametrize(
    "header",
    [
        HEADER,
        HEADER + "\n",
        HEADER.removesuffix(" cch=36ee5;"),
        HEADER + " cc_workload=cron;",
        HEADER.replace("36ee5", "00000"),
    ],
)
async def test_a_block_that_is_the_header_is_left_out(header):
    assert await prompt_of(text(header, RULES)) == f"<system>{RULES}<user>hi<assistant>"


@pytest.mark.parametrize("system", [text(HEADER), HEADER])
async def test_a_system_prompt_of_the_header_alone_is_none(system):
    assert await prompt_of(system) == "<user>hi<assistant>"


@pytest.mark.parametrize(
    "block",
    [
        f"{HEADER} {RULES}",
        f"{HEADER}\n{RULES}",
        f"Say {HEADER}",
        "x-anthropic-billing-header: anything",
        "x-anthropic-billing-header:",
        HEADER.replace("cch=", "secret="),
        HEADER.upper(),
    ],
)
async def test_any_other_text_stays(block):
    assert await prompt_of(text(block)) == f"<system>{block}<user>hi<assistant>"


async def test_the_header_in_a_message_stays():
    async with answering_api(CallFormat.HERMES) as api, httpx.AsyncClient(base_url=api.url) as http:
        api.source.answers = ["yes"]
        await http.post("/messages", json={"messages": [{"role": "user", "content": HEADER}], "max_tokens": 5})
        assert HEADER in api.source.prompt


async def test_the_nonce_is_not_logged(caplog):
    caplog.set_level(logging.DEBUG)
    await prompt_of(text(HEADER, RULES))
    async with answering_api(CallFormat.HERMES) as api, httpx.AsyncClient(base_url=api.url) as http:
        refused = await http.post("/messages", json={"messages": 5, "max_tokens": 5, "system": text(HEADER)})
        assert refused.status_code == 400
        assert "36ee5" not in refused.text
    assert "36ee5" not in caplog.text
