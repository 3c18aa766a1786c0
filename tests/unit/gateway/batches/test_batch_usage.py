"""The tokens of a batch, from the bodies of several APIs."""

import json
from typing import Any

import pytest

from kvferry.gateway.batches.batch_usage import BatchInputDetails, BatchOutputDetails, BatchUsage, usage_of


def line(body: Any) -> bytes:
    return json.dumps({"custom_id": "a", "response": {"status_code": 200, "body": body}, "error": None}).encode()


CHAT = {
    "prompt_tokens": 10,
    "completion_tokens": 5,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 3},
}
RESPONSE = {
    "input_tokens": 7,
    "input_tokens_details": {"cached_tokens": 2},
    "output_tokens": 6,
    "output_tokens_details": {"reasoning_tokens": 1},
    "total_tokens": 13,
}
EMBEDDINGS = {"prompt_tokens": 8, "total_tokens": 8}


def test_the_usage_of_all_apis_is_added() -> None:
    found = usage_of(line({"id": "x", "usage": usage}) for usage in (CHAT, RESPONSE, EMBEDDINGS, CHAT))
    assert found == BatchUsage(35, BatchInputDetails(10), 16, BatchOutputDetails(7), 51)


@pytest.mark.parametrize(
    "text",
    [
        line({"id": "x"}),
        line({"usage": None}),
        line({"usage": {**CHAT, "prompt_tokens": "many"}}),
        line(None),
        b'{"custom_id": "a", "response": null}',
        b"cut",
        b"",
    ],
)
def test_a_line_without_usage_counts_nothing(text: bytes) -> None:
    assert usage_of([text]) == BatchUsage()
