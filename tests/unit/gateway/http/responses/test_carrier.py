"""Carriers of reasoning: a client that sends back only the carrier continues with the same prompt as one that sends the
text; damaged and foreign carriers have no effect."""

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from harness.fakes.scripted_answers import AnsweringApi, answering_api
from hypothesis import given
from hypothesis import strategies as st

from kvferry.gateway.http.responses.carrier import CarrierKey
from kvferry.text.answers.registry import CallFormat

KEY = CarrierKey.of(b"a secret of the pool", "tenant-a")


@given(st.text(st.characters(exclude_categories=()), max_size=200))
def test_a_carrier_returns_its_reasoning(reasoning):
    assert KEY.opened(KEY.seal(reasoning)) == reasoning


@given(st.data())
def test_a_damaged_carrier_is_not_opened(data):
    raw = bytearray(base64.urlsafe_b64decode(KEY.seal("because it rained")))
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    assert KEY.opened(base64.urlsafe_b64encode(bytes(raw)).decode()) is None
    assert KEY.opened(base64.urlsafe_b64encode(bytes(raw[:place])).decode()) is None


@given(st.text(max_size=100))
def test_any_other_text_is_no_carrier(text):
    assert KEY.opened(text) is None


def test_another_tenant_and_another_pool_open_nothing():
    carrier = KEY.seal("because it rained")
    assert CarrierKey.of(b"a secret of the pool", "tenant-b").opened(carrier) is None
    assert CarrierKey.of(b"another secret", "tenant-a").opened(carrier) is None
    assert CarrierKey.of(b"a secret of the pool", "tenant-a").opened(carrier) == "because it rained"


@pytest.fixture
async def api() -> AsyncIterator[AnsweringApi]:
    async with answering_api(CallFormat.HERMES, has_reasoning=True) as running:
        running.source.answers = ["<think>Rain is wet.</think>It is wet."]
        yield running


async def create(api: AnsweringApi, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=api.url) as http:
        answer = await http.post("/responses", json=body)
    assert answer.status_code == 200, answer.text
    return answer


CARRIER: dict[str, Any] = {"include": ["reasoning.encrypted_content"], "store": False}


async def test_reasoning_has_a_carrier_only_if_the_request_includes_it(api):
    with_carrier = (await create(api, input="Is rain wet?", **CARRIER)).json()["output"][0]
    without = (await create(api, input="Is rain wet?")).json()["output"][0]
    assert with_carrier["type"] == without["type"] == "reasoning"
    assert with_carrier["encrypted_content"]
    assert "encrypted_content" not in without


async def test_the_carrier_is_in_the_last_events_of_a_stream(api):
    text = (await create(api, input="Is rain wet?", stream=True, **CARRIER)).text
    events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
    (added,) = [e for e in events if e["type"] == "response.output_item.added" and e["item"]["type"] == "reasoning"]
    (done,) = [e for e in events if e["type"] == "response.output_item.done" and e["item"]["type"] == "reasoning"]
    assert "encrypted_content" not in added["item"]
    assert done["item"]["encrypted_content"] == events[-1]["response"]["output"][0]["encrypted_content"]


async def test_a_carrier_alone_gives_the_prompt_of_its_text(api):
    question = {"role": "user", "content": "Is rain wet?"}
    first = (await create(api, input=[question], **CARRIER)).json()["output"]
    bare = {**first[0], "content": None, "summary": []}
    again = {"role": "user", "content": "Sure?"}
    answer = await create(api, input=[question, bare, *first[1:], again], **CARRIER)
    carried = api.source.prompt
    assert "kvferry-ignored" not in answer.headers
    await create(api, input=[question, *first, again])
    assert carried == api.source.prompt
    without = {**bare, "encrypted_content": "gAAAA"}
    answer = await create(api, input=[question, without, *first[1:], again])
    assert answer.headers["kvferry-ignored"] == "input.encrypted_content"


async def test_a_carrier_in_a_stored_conversation_is_opened(api):
    first = (await create(api, input="Is rain wet?", include=CARRIER["include"])).json()
    answer = await create(api, input="Sure?", previous_response_id=first["id"])
    assert "kvferry-ignored" not in answer.headers
