"""The log-probabilities of an answer that is sent as a whole are bounded, over all samples."""

import httpx
import pytest
from harness.fakes.scripted_answers import answering_api

from kvferry.text.answers.registry import CallFormat

CHAT = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
TEXT = {"prompt": "a", "logprobs": 20}


@pytest.mark.parametrize(("path", "body"), [("/chat/completions", CHAT), ("/completions", TEXT)])
async def test_more_than_the_limit_is_refused_unless_it_is_streamed(path: str, body: dict[str, object]) -> None:
    async with (
        answering_api(CallFormat.HERMES) as api,
        httpx.AsyncClient(base_url=api.url) as http,
    ):
        api.source.answers = ["b"] * 128
        answer = await http.post(path, json={**body, "n": 64, "max_tokens": 840})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "logprobs")
        assert "may have 1128960 log-probabilities; at most 1048576" in error["message"]
        assert "set stream" in error["message"]
        for fits in ({"n": 64, "max_tokens": 780}, {"n": 64, "max_tokens": 840, "stream": True}, {"n": 1}):
            accepted = await http.post(path, json={**body, **fits})
            assert accepted.status_code == 200, accepted.text
