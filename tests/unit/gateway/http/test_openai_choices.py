"""Choices of a response: which samples are returned, and the text before and after the output."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from harness.fakes.byte_model import BOS, byte_model
from harness.fakes.scripted_tokens import ScriptedSource

from kvferry.core.clock import ManualClock
from kvferry.core.errors import CONSTRAINT_TOO_COMPLEX, InvalidRequest, KvferryError
from kvferry.core.ids import RequestId
from kvferry.core.sampling import FinishReason, SampledToken, ScoredToken
from kvferry.gateway.http.openai import reply
from kvferry.gateway.http.openai.completions import answer, events
from kvferry.gateway.http.openai.generation import prepare_chat, prepare_completion
from kvferry.serving.request import Caller, Request
from kvferry.serving.text_service import TextService
from kvferry.serving.token_source import TokenEvent, TokenSource

CALLER = Caller(RequestId("r"))


class Rated:
    """A source whose sample i has two tokens, both the letter `a` + i, with the given log-probabilities."""

    def __init__(self, *logprobs: tuple[float, float]) -> None:
        self.logprobs = logprobs
        self.asked: list[Request] = []

    async def stream(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        self.asked.append(request)
        first, second = self.logprobs[request.sample_index]
        letter = ord("a") + request.sample_index
        with_top = ((letter, first),) * (request.sampling.logprobs or 0)
        shown = request.sampling.logprobs is not None
        yield TokenEvent((SampledToken(letter, first if shown else None, with_top),))
        yield TokenEvent((SampledToken(letter, second if shown else None, with_top),), FinishReason.LENGTH)


async def complete(source: TokenSource, **fields: Any) -> dict[str, Any]:
    service = TextService(source, byte_model(64), ManualClock(), new_seed=lambda: 1)
    body = json.dumps({"prompt": "hi", "max_tokens": 2, **fields}).encode()
    whole, _ = await answer(await prepare_completion(service, CALLER, body, 8))
    return json.loads(whole)  # type: ignore[no-any-return]


async def streamed(source: TokenSource, *, chat: bool = False, **fields: Any) -> list[dict[str, Any]]:
    service = TextService(source, byte_model(64), ManualClock(), new_seed=lambda: 1)
    body = json.dumps({"max_tokens": 2, "stream": True, **fields}).encode()
    made = await (prepare_chat(service, CALLER, body) if chat else prepare_completion(service, CALLER, body, 8))
    chunks = [json.loads(event.removeprefix(b"data: ")) async for event in events(made)]
    return [choice for chunk in chunks for choice in chunk["choices"]]


FOUR = ((-1.0, -1.0), (-0.1, -3.0), (-0.5, -0.4), (-9.0, -0.0))


async def test_the_best_samples_by_cumulative_log_probability_are_returned() -> None:
    made = await complete(Rated(*FOUR), best_of=4, n=2)
    assert [(c["index"], c["text"], c["logprobs"]) for c in made["choices"]] == [(0, "cc", None), (1, "aa", None)]
    assert made["usage"]["completion_tokens"] == 8, "usage includes the samples that are not returned"
    several = await complete(Rated(*FOUR), best_of=3, prompt=["x", "y"], logprobs=1)
    assert [c["text"] for c in several["choices"]] == ["cc", "cc"]
    assert several["choices"][1]["logprobs"]["token_logprobs"] == [-0.5, -0.4]


async def test_without_best_of_samples_keep_their_order_and_need_no_log_probabilities() -> None:
    source = Rated(*FOUR)
    made = await complete(source, n=3)
    assert [c["text"] for c in made["choices"]] == ["aa", "bb", "cc"]
    assert {asked.sampling.logprobs for asked in source.asked} == {None}
    await complete(source, n=2, best_of=2, logprobs=0)
    assert source.asked[-1].sampling.logprobs == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_is_repeated_before_each_output(stream: bool) -> None:
    fields: dict[str, Any] = {"prompt": ["hi", "yo"], "echo": True, "n": 2}
    choices = await streamed(Rated(*FOUR), **fields) if stream else (await complete(Rated(*FOUR), **fields))["choices"]
    texts = {index: "".join(c["text"] for c in choices if c["index"] == index) for index in range(4)}
    assert texts == {0: "hiaa", 1: "hibb", 2: "yoaa", 3: "yobb"}


async def test_an_echo_shows_what_truncation_leaves_and_decodes_token_ids() -> None:
    cut = await complete(Rated(*FOUR), prompt="hello", echo=True, truncate_prompt_tokens=2)
    assert cut["choices"][0]["text"] == "loaa"
    assert cut["usage"]["prompt_tokens"] == 2
    ids = await complete(Rated(*FOUR), prompt=[BOS, *b"ab"], echo=True)
    assert ids["choices"][0]["text"] == "abaa"
    assert (await complete(Rated(*FOUR)))["choices"][0]["text"] == "aa"


async def test_truncation_admits_a_prompt_that_is_too_long() -> None:
    source = Rated(*FOUR)
    made = await complete(source, prompt="x" * 100, truncate_prompt_tokens=-1)
    assert made["usage"]["prompt_tokens"] == 62
    assert list(source.asked[0].token_ids) == list(b"x" * 62)
    assert source.asked[0].sampling.truncate_prompt_tokens is None


STOP: list[tuple[dict[str, Any], str, str | None]] = [
    ({"stop": "cd"}, "stop", "cd"),
    ({"stop": "x"}, "length", None),
]


@pytest.mark.parametrize(("fields", "finish", "reason"), STOP)
async def test_the_stop_reason_is_the_stop_string(fields: dict[str, Any], finish: str, reason: str | None) -> None:
    source = ScriptedSource(text="abcdef")
    (whole,) = (await complete(source, max_tokens=6, **fields))["choices"]
    assert (whole["finish_reason"], whole["stop_reason"]) == (finish, reason)
    messages = [{"role": "user", "content": "hi"}]
    for chat, prompt in ((False, {"prompt": "hi"}), (True, {"messages": messages})):
        *before, last = await streamed(source, chat=chat, max_tokens=6, **prompt, **fields)
        assert (last["finish_reason"], last["stop_reason"]) == (finish, reason)
        assert {choice["stop_reason"] for choice in before} <= {None}


async def test_the_stop_reason_is_the_stop_token() -> None:
    class Stopped(ScriptedSource):
        async def stream(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
            yield TokenEvent((SampledToken(65), SampledToken(66)), FinishReason.STOP)

    (choice,) = (await complete(Stopped(), stop_token_ids=[66, 70]))["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("AB", "stop", 66)
    (choice,) = (await complete(Stopped(), stop_token_ids=[70]))["choices"]
    assert choice["stop_reason"] is None


async def test_the_stop_string_is_included_and_min_tokens_apply_to_it() -> None:
    async def text(**fields: Any) -> str:
        made = await complete(ScriptedSource(text="abcabc"), max_tokens=6, stop=["b"], **fields)
        return str(made["choices"][0]["text"])

    assert await text() == "a"
    assert await text(include_stop_str_in_output=True) == "ab"
    assert await text(min_tokens=2) == "abca"
    assert await text(min_tokens=5) == "abcabc"


class Scored:
    """A source with two tokens after the prompt; the log-probability of a prompt token is minus its position."""

    async def stream(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        asked = request.sampling
        scores = None
        if asked.prompt_logprobs is not None:
            top = tuple((ord("A") + rank, -0.5 - rank) for rank in range(asked.prompt_logprobs))
            scores = tuple(ScoredToken(t, -float(i), i + 2, top) for i, t in enumerate(request.token_ids[1:], 1))
        logprob = None if asked.logprobs is None else -0.25
        yield TokenEvent((SampledToken(ord("x"), logprob),), prompt_logprobs=scores)
        yield TokenEvent((SampledToken(ord("y"), logprob),), FinishReason.LENGTH)


async def test_prompt_log_probabilities_have_the_tokens_and_their_alternatives() -> None:
    made = await complete(Scored(), prompt=[*b"hi"], prompt_logprobs=1, n=2)
    for choice in made["choices"]:
        assert choice["prompt_logprobs"] == [
            None,
            {
                "105": {"logprob": -1.0, "rank": 3, "decoded_token": "i"},
                "65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"},
            },
        ]
        assert choice["logprobs"] is None
    bare = await complete(Scored(), prompt=[*b"hi"], prompt_logprobs=0)
    assert bare["choices"][0]["prompt_logprobs"][1].keys() == {"105"}
    assert "prompt_logprobs" not in (await complete(Scored()))["choices"][0]
    assert (await complete(Scored(), prompt=[104], prompt_logprobs=2))["choices"][0]["prompt_logprobs"] == [None]


async def test_prompt_log_probabilities_of_a_conversation_are_beside_the_choices() -> None:
    service = TextService(Scored(), byte_model(64), ManualClock(), new_seed=lambda: 1)
    body = {"messages": [{"role": "user", "content": "h"}], "max_tokens": 2, "prompt_logprobs": 0}
    whole, _ = await answer(await prepare_chat(service, CALLER, json.dumps(body).encode()))
    found = json.loads(whole)["prompt_logprobs"]
    assert found[:2] == [None, {"117": {"logprob": -1.0, "rank": 3, "decoded_token": "u"}}]
    assert len(found) == len("<user>h<assistant>")
    assert "prompt_logprobs" not in json.loads(whole)["choices"][0]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_has_the_log_probabilities_of_the_prompt(stream: bool) -> None:
    fields: dict[str, Any] = {"prompt": [*b"hey"], "echo": True, "logprobs": 1}
    if stream:
        parts = [choice["logprobs"] for choice in await streamed(Scored(), **fields) if choice["logprobs"]]
        found = {name: [item for part in parts for item in part[name]] for name in parts[0]}
    else:
        (choice,) = (await complete(Scored(), **fields))["choices"]
        assert choice["text"] == "heyxy"
        assert "prompt_logprobs" not in choice
        found = choice["logprobs"]
    assert found["tokens"] == ["h", "e", "y", "x", "y"]
    assert found["token_logprobs"] == [None, -1.0, -2.0, -0.25, -0.25]
    assert found["top_logprobs"] == [None, {"A": -0.5, "e": -1.0}, {"A": -0.5, "y": -2.0}, {"x": -0.25}, {"y": -0.25}]
    assert found["text_offset"] == [0, 1, 2, 3, 4]


async def test_an_echo_and_prompt_log_probabilities_may_have_numbers_of_their_own() -> None:
    made = await complete(Scored(), prompt=[*b"he"], echo=True, logprobs=1, prompt_logprobs=3)
    assert len(made["choices"][0]["logprobs"]["top_logprobs"][1]) == 1 + 1, "the alternative and the token itself"
    assert len(made["choices"][0]["prompt_logprobs"][1]) == 4


async def test_the_log_probabilities_of_all_samples_are_bounded_together() -> None:
    fields: dict[str, Any] = {"prompt": [[65] * 60] * 8, "prompt_logprobs": 20}
    assert len((await complete(Scored(), **fields, n=6))["choices"]) == 48
    with pytest.raises(InvalidRequest, match=r"3360 prompt tokens.*at most 65536") as caught:
        await complete(Scored(), **fields, n=7)
    assert caught.value.field == "prompt_logprobs"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_without_output_scores_the_prompt_alone(stream: bool) -> None:
    fields: dict[str, Any] = {"prompt": [*b"hey"], "echo": True, "logprobs": 0, "max_tokens": 0}
    if stream:
        choices = await streamed(Scored(), **fields)
        found = next(choice["logprobs"] for choice in choices if choice["logprobs"])
        assert "".join(choice["text"] for choice in choices) == "hey"
        assert choices[-1]["finish_reason"] == "length"
    else:
        made = await complete(Scored(), **fields)
        (choice,) = made["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hey", "length", None)
        assert made["usage"]["completion_tokens"] == 0
        found = choice["logprobs"]
    assert (found["tokens"], found["token_logprobs"]) == (["h", "e", "y"], [None, -1.0, -2.0])
    with pytest.raises(InvalidRequest, match="max_tokens must be a whole number from 1"):
        await complete(Scored(), prompt="hey", max_tokens=0)


class Ending:
    """A source that generates one token and then cannot continue."""

    def __init__(self, error: KvferryError) -> None:
        self.error = error

    async def stream(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        yield TokenEvent((SampledToken(ord("a"), None, ()),))
        raise self.error


@pytest.mark.parametrize("read", [complete, streamed])
async def test_an_output_that_its_constraint_ends_has_an_error_with_the_field_of_the_request(read: Any) -> None:
    """The engine receives a constraint without the name of the request's field that set it."""
    source = Ending(InvalidRequest("it is too complex", field="constraint", reason=CONSTRAINT_TOO_COMPLEX))
    with pytest.raises(InvalidRequest, match="guided_regex: it is too complex") as caught:
        await read(source, prompt="hi", guided_regex="a*")
    assert caught.value.field == "guided_regex"
    assert caught.value.reason == CONSTRAINT_TOO_COMPLEX


def test_tokens_of_a_split_character_differ_and_have_its_position() -> None:
    character = "日".encode()
    spelled = {0: b"a", 1: character[:1], 2: character[1:], 3: b"b", 4: b"\xff"}
    tokens = [
        SampledToken(0, -0.1),
        SampledToken(1, -0.2, ((1, -0.2), (4, -3.0))),
        SampledToken(2, -0.3),
        SampledToken(3, -0.4),
    ]
    found = reply.completion_logprobs(tokens, lambda token_id: spelled[token_id], reply.TextOffsets())
    assert found is not None
    assert found.tokens == ["a", r"bytes:\xe6", r"bytes:\x97\xa5", "b"]
    assert found.text_offset == [0, 1, 1, 2]
    assert found.top_logprobs[1] == {r"bytes:\xe6": -0.2, r"bytes:\xff": -3.0}
