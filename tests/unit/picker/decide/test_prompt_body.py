"""Prompts of the routes of OpenAI, Anthropic, vLLM and SGLang, and bodies that are none."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.picker.decide.prompt_body import (
    CHUNK_BYTES,
    MAX_CHUNKS,
    BodyProblem,
    affinity_key,
    chunk_names,
    read_body,
)

LONG = "a system prompt that is shared. " * 40


def names(body: object) -> list[int]:
    return chunk_names(read_body(json.dumps(body).encode()))


def shared(first: object, second: object) -> int:
    """Return the number of equal leading chunks."""
    count = 0
    for one, other in zip(names(first), names(second), strict=False):
        if one != other:
            break
        count += 1
    return count


def messages(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "user" if number % 2 else "system", "content": text} for number, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"prompt": LONG + "x"}, {"prompt": LONG + "y"}),
        ({"prompt": [LONG + "x", "z"]}, {"prompt": [LONG + "y"]}),
        ({"input": LONG + "x"}, {"input": LONG + "y"}),
        ({"text": LONG + "x"}, {"text": LONG + "y"}),
        ({"input_ids": [*range(400), 1]}, {"input_ids": [*range(400), 2]}),
        ({"token_ids": [*range(400), 1]}, {"token_ids": [*range(400), 2]}),
        ({"prompt": [[*range(400), 1]]}, {"prompt": [[*range(400), 2]]}),
        ({"messages": messages(LONG, "x")}, {"messages": messages(LONG, "y")}),
        ({"messages": messages(LONG)}, {"messages": messages(LONG, "x", LONG)}),
        ({"system": LONG, "messages": messages("x")}, {"system": LONG, "messages": messages("y")}),
        ({"instructions": LONG, "input": "x"}, {"instructions": LONG, "input": messages("y")}),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": LONG}, {"type": "image_url", "a": 1}]}
                ]
            },
            {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}, *messages("y")]},
        ),
        (
            {"tools": [{"name": LONG}], "messages": messages("x")},
            {"tools": [{"name": LONG}], "messages": messages("y")},
        ),
    ],
)
def test_prompts_that_begin_alike_share_chunks(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert shared(first, second) >= 4
    assert shared({"model": "a", **first}, {"model": "b", **second}) == 0
    assert shared({"cache_salt": "a", **first}, {"cache_salt": "b", **second}) == 0


def test_the_fields_of_a_body() -> None:
    body = read_body(json.dumps({"model": "m", "prompt": "abcd" * 10, "max_tokens": 7, "cache_salt": "s"}).encode())
    assert (body.model, body.salt, body.max_output_tokens, body.num_tokens) == ("m", "s", 7, 10)
    assert body.problem is BodyProblem.NONE


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (None, BodyProblem.NO_BODY),
        (b"", BodyProblem.NO_BODY),
        (b"{", BodyProblem.NOT_JSON),
        (b"[1]", BodyProblem.NOT_JSON),
        (b"\xff", BodyProblem.NOT_JSON),
        (b"[" * 1_000_000, BodyProblem.NOT_JSON),
        (b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", BodyProblem.NOT_JSON),
        (b"{}", BodyProblem.NO_PROMPT),
        (b'{"model":"m"}', BodyProblem.NO_PROMPT),
        (b'{"model":5,"prompt":null,"messages":7}', BodyProblem.NO_PROMPT),
        (b'{"prompt":""}', BodyProblem.NO_PROMPT),
    ],
)
def test_bodies_without_a_prompt(body: bytes | None, problem: BodyProblem) -> None:
    assert read_body(body).problem is problem
    assert read_body(body).num_tokens == 1


def test_a_body_that_is_cut() -> None:
    assert read_body(b'{"prompt":"abc"}', is_cut=True).problem is BodyProblem.TOO_LARGE


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "7", 2**53, 10**30])
def test_a_limit_that_is_none_is_unknown(limit: object) -> None:
    assert read_body(json.dumps({"prompt": "x", "max_tokens": limit}).encode()).max_output_tokens == 0


@pytest.mark.parametrize("token", [-1, 2**32, 2**63, "x", None, 1.5])
def test_tokens_of_any_kind(token: object) -> None:
    assert read_body(json.dumps({"prompt": [1, token] * 200}).encode()).text


def test_long_prompts_have_a_bounded_number_of_names() -> None:
    assert len(names({"prompt": "x" * (2 * MAX_CHUNKS * CHUNK_BYTES)})) == MAX_CHUNKS


def test_the_key_of_short_and_long_prompts() -> None:
    short, other = (read_body(json.dumps({"prompt": text}).encode()) for text in ("a", "b"))
    assert affinity_key(short, [], 4) != affinity_key(other, [], 4)
    first, second = (read_body(json.dumps({"prompt": LONG * 2 + text}).encode()) for text in ("x", "y"))
    assert affinity_key(first, chunk_names(first), 4) == affinity_key(second, chunk_names(second), 4)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=20,
)
_FIELDS = st.sampled_from(
    ["model", "prompt", "input", "messages", "tools", "system", "instructions", "text", "max_tokens", "cache_salt"]
)


@given(st.dictionaries(_FIELDS, _JSON, max_size=5))
def test_no_body_breaks_it(body: dict[str, Any]) -> None:
    found = read_body(json.dumps(body).encode())
    assert found.num_tokens >= 1
    chunk_names(found)
    affinity_key(found, chunk_names(found), 4)


def test_a_lone_surrogate_is_routed() -> None:
    assert read_body(b'{"prompt":"\\ud800","model":"\\ud800"}').num_tokens >= 1


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"a": 1}] * 100_000},
        {"messages": ["x"] * 200_000},
        {"prompt": list(range(150_000))},
        {"prompt": "x" * 900_000},
        {"input": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 30_000}] * 2},
        {"tools": [{"a": 1}] * 100_000, "prompt": "x"},
    ],
)
def test_of_large_bodies_only_the_beginning_is_read(body: dict[str, Any]) -> None:
    text = json.dumps(body).encode()
    found = read_body(text)
    assert len(found.text) <= MAX_CHUNKS * CHUNK_BYTES
    assert found.num_tokens >= min(len(text), MAX_CHUNKS * CHUNK_BYTES) // 8
