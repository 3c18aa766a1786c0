"""Beam search of the text APIs: the outputs of the search, one request per live beam, and fields that it excludes."""

import json
import math
from collections.abc import AsyncGenerator
from random import Random
from typing import Any

import pytest
from harness.fakes.byte_model import byte_model

from kvferry.core.clock import ManualClock
from kvferry.core.errors import InvalidRequest, KvferryError, Unavailable
from kvferry.core.ids import RequestId
from kvferry.core.inference.beams import BeamParams
from kvferry.core.sampling import FinishReason, SampledToken
from kvferry.gateway.http.openai.completions import answer
from kvferry.gateway.http.openai.generation import prepare_chat, prepare_completion
from kvferry.serving.request import Caller, Request
from kvferry.serving.text_service import TextService
from kvferry.serving.token_source import TokenEvent
from kvferry.text.requests.beams import Beam, Beams

CALLER = Caller(RequestId("r"))
MODEL = byte_model(64)


def alternatives(tokens: tuple[int, ...], count: int) -> tuple[tuple[int, float], ...]:
    """Return a distribution over a few letters and the end token that depends on all tokens."""
    draw = Random(repr(tokens))
    weights = {token: draw.random() for token in (*b"abcdefghijklmnopqr", MODEL.eos_token_ids[0])}
    total = sum(weights.values())
    ranked = sorted(((token, math.log(weight / total)) for token, weight in weights.items()), key=lambda one: -one[1])
    return tuple(ranked[:count])


class Table:
    """A source of single tokens; requests fail from number `fails_at` on."""

    def __init__(self, fails_at: int = 1 << 30) -> None:
        self.requests: list[Request] = []
        self.num_open = 0
        self.fails_at = fails_at

    async def stream(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        self.requests.append(request)
        self.num_open += 1
        try:
            if len(self.requests) > self.fails_at:
                raise Unavailable("gone")
            sampling = request.sampling
            assert sampling.max_tokens == 1
            assert sampling.logprobs is not None
            top = alternatives(tuple(request.token_ids), sampling.logprobs)
            yield TokenEvent((SampledToken(top[0][0], top[0][1], top),), FinishReason.LENGTH, num_cached_tokens=1)
        finally:
            self.num_open -= 1


def expected(prompt: list[int], params: BeamParams) -> list[Beam]:
    beams = Beams(params, frozenset(MODEL.eos_token_ids))
    while not beams.is_done:
        beams.advance([alternatives((*prompt, *beam.tokens), 2 * params.width) for beam in beams.live])
    return beams.best(params.width)


def rounds(prompt: list[int], params: BeamParams) -> int:
    beams, count = Beams(params, frozenset(MODEL.eos_token_ids)), 0
    while not beams.is_done:
        beams.advance([alternatives((*prompt, *beam.tokens), 2 * params.width) for beam in beams.live])
        count += 1
    return count


async def complete(source: Any, *, chat: bool = False, context: int = 64, **fields: Any) -> dict[str, Any]:
    service = TextService(source, byte_model(context), ManualClock(), new_seed=lambda: 1)
    body = json.dumps({"use_beam_search": True, **fields}).encode()
    made = await (prepare_chat(service, CALLER, body) if chat else prepare_completion(service, CALLER, body, 8))
    whole, _ = await answer(made)
    return json.loads(whole)  # type: ignore[no-any-return]


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("early", [False, True])
async def test_the_best_outputs_of_the_search_are_returned_in_order(penalty: float, early: bool) -> None:
    source = Table()
    made = await complete(
        source, prompt=[*b"hey"], n=2, best_of=4, max_tokens=9, length_penalty=penalty, early_stopping=early
    )
    best = expected([*b"hey"], BeamParams(4, 9, penalty, early))[:2]
    texts = [bytes(token for token in beam.tokens if token < 256).decode() for beam in best]
    assert [choice["text"] for choice in made["choices"]] == texts
    assert [choice["finish_reason"] for choice in made["choices"]] == [beam.finish_reason for beam in best]
    assert made["usage"]["completion_tokens"] == 4 * rounds([*b"hey"], BeamParams(4, 9, penalty, early))
    assert made["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    assert len({request.sample_index for request in source.requests}) == len(source.requests)
    assert source.num_open == 0


async def test_a_conversation_has_n_beams_and_fills_at_most_the_context() -> None:
    made = await complete(Table(), chat=True, messages=[{"role": "user", "content": "x"}], n=3, ignore_eos=True)
    assert len(made["choices"]) == 3
    assert made["usage"]["prompt_tokens"] + made["usage"]["completion_tokens"] // 3 == 64


async def test_a_request_that_fails_ends_the_search_and_leaves_none_open() -> None:
    source = Table(fails_at=5)
    with pytest.raises(KvferryError, match="gone"):
        await complete(source, prompt="hey", n=4, max_tokens=8)
    assert source.num_open == 0


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stream": True}, "stream"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": 0}, "logprobs"),
        ({"stop": "x"}, "stop"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object"),
        ({"top_p": 0.5}, "top_p"),
        ({"temperature": 0.7}, "temperature"),
        ({"echo": True}, "echo"),
        ({"n": 9}, "n"),
        ({"n": 2, "best_of": 9}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"use_beam_search": False, "length_penalty": 1}, "length_penalty"),
        ({"use_beam_search": None, "early_stopping": True}, "early_stopping"),
    ],
)
async def test_fields_that_a_search_excludes_are_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await complete(Table(), prompt="hey", **fields)
    assert caught.value.field == field


NEUTRAL = {
    "top_p": 1, "top_k": 0, "min_p": 0, "typical_p": 1, "stop": [], "min_tokens": 0, "presence_penalty": 0,
    "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "bad_words": [], "stop_token_ids": [],
    "echo": False, "stream": False, "seed": 7, "speculation": False,
}  # fmt: skip


@pytest.mark.parametrize("temperature", [0, 1])
async def test_values_without_effect_are_accepted(temperature: int) -> None:
    plain = await complete(Table(), prompt="hey", n=2, max_tokens=4)
    assert await complete(Table(), prompt="hey", n=2, max_tokens=4, temperature=temperature, **NEUTRAL) == plain


async def test_a_width_out_of_range_is_named_by_the_field_that_sets_it() -> None:
    with pytest.raises(InvalidRequest, match="best_of must be a whole number from 1 to 8 with use_beam_search, not 9"):
        await complete(Table(), prompt="hey", best_of=9)
    with pytest.raises(InvalidRequest, match="n must be a whole number from 1 to 8 with use_beam_search, not 10"):
        await complete(Table(), prompt="hey", n=10)


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def test_a_conversation_returns_the_best_of_its_beams() -> None:
    best = await complete(Table(), chat=True, **CHAT, best_of=4)
    all_beams = await complete(Table(), chat=True, **CHAT, n=4)
    assert len(best["choices"]) == 1
    assert best["choices"][0] == all_beams["choices"][0]
    assert best["usage"]["completion_tokens"] == all_beams["usage"]["completion_tokens"]
    offered = await complete(Table(), chat=True, context=2048, **CHAT, best_of=4, tools=[TOOL])
    assert offered["usage"]["completion_tokens"] == 4 * 5


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"best_of": 2, "use_beam_search": False}, "best_of"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
    ],
)
async def test_fields_that_a_search_excludes_are_refused_in_conversations(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await complete(Table(), chat=True, **CHAT, **fields)
    assert caught.value.field == field


async def test_a_search_may_never_stop_early() -> None:
    params = BeamParams(4, 9, 2.0, "never")
    made = await complete(Table(), prompt=[*b"hey"], best_of=4, max_tokens=9, length_penalty=2, early_stopping="never")
    best = expected([*b"hey"], params)[0]
    assert made["choices"][0]["text"] == bytes(token for token in best.tokens if token < 256).decode()
    assert made["usage"]["completion_tokens"] == 4 * rounds([*b"hey"], params)
