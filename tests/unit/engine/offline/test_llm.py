"""The offline API: parameters for each prompt, conversations, progress; the engine is idle afterwards."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest

from kvferry.core.errors import InvalidRequest
from kvferry.core.inference.beams import BeamParams
from kvferry.core.inference.tools import Tool
from kvferry.core.settings.engine import EngineSettings, SchedulerLimits
from kvferry.engine import LLM, SamplingParams
from kvferry.text.tools.conversations import encode_chat

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", dtype="float32", kv_memory=16 << 20)


def test_each_prompt_has_its_parameters(llm: LLM) -> None:
    drawn = SamplingParams(temperature=1.0, seed=3, max_tokens=5, ignore_eos=True)
    both = llm.generate(["hello", "hello"], [GREEDY, drawn])
    assert [len(out.token_ids) for out in both] == [8, 5]
    assert both[0].token_ids == llm.generate(["hello"], GREEDY)[0].token_ids
    assert both[1].token_ids == llm.generate(["hello"], drawn)[0].token_ids
    assert llm.engine.is_idle


def test_unequal_numbers_are_named(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="sampling has 2 items for 1 prompts"):
        llm.generate(["hello"], [GREEDY, GREEDY])
    assert llm.engine.is_idle


def test_a_conversation_is_rendered_by_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (answer,) = llm.chat([messages], GREEDY)
    source = llm._loaded.source
    assert source is not None
    assert source.chat_template is not None
    prompt = encode_chat(source.chat_template, llm.tokenizer, messages)
    assert answer.prompt_token_ids == tuple(prompt)
    assert answer.token_ids == llm.generate([prompt], GREEDY)[0].token_ids


def test_one_prompt_and_one_conversation_need_no_list(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello", add_special=True)
    texts = [out.text for out in (*llm.generate("hello", GREEDY), *llm.generate(ids, GREEDY))]
    assert texts == [out.text for out in llm.generate(["hello", ids], GREEDY)]
    message = {"role": "user", "content": "hello"}
    assert [a.text for a in llm.chat([message], GREEDY)] == [a.text for a in llm.chat([[message]], GREEDY)]
    assert len(llm.encode("hello")) == 1
    assert len(llm.beam_search("hello", BeamParams(width=2, max_tokens=2))) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(5), "prompts must be a string, a list of token ids, or a list of these, not 5"),
        (lambda llm: llm.generate([None]), "prompts.0 must be a string or a list of token ids, not None"),
        (lambda llm: llm.generate(["a", b"x"]), "prompts.1 must be a string or a list of token ids, not b'x'"),
        (lambda llm: llm.generate([[1], ["a"]]), "prompts.1 contains 'a'; token ids must be integers"),
        (lambda llm: llm.generate([[True]]), "prompts.0 contains True; token ids must be integers"),
        (lambda llm: llm.generate([[1.5]]), "prompts.0 contains 1.5"),
        (lambda llm: llm.generate([{}]), "prompts.0 must be a string or a list of token ids, not {}"),
        (lambda llm: llm.generate(["a"], 5), "sampling must be SamplingParams or a list of them, not 5"),
        (lambda llm: llm.generate(["a"], [5]), r"sampling must be SamplingParams or a list of them, not \[5\]"),
        (lambda llm: llm.encode([5, "a"]), "prompts.0 must be a string or a list of token ids, not 5"),
        (lambda llm: llm.score("a", [5, None]), "b.0 must be a string or a list of token ids, not 5"),
        (lambda llm: llm.beam_search(["a"], 2), "params must be a BeamParams, not int"),
        (lambda llm: llm.chat("hello"), r"conversations must be a list of messages, or .*, not 'hello'"),
        (lambda llm: llm.chat([["hello"]]), r"conversations.0.0 must be a message such as .*, not 'hello'"),
        (lambda llm: llm.chat([{"content": "hello"}]), r"conversations.0.0 must .*, not {'content': 'hello'}"),
    ],
)  # fmt: skip
def test_arguments_of_other_types_are_named(llm: LLM, call, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        call(llm)
    assert llm.engine.is_idle


def test_functions_reach_the_prompt(llm: LLM) -> None:
    tool = Tool("get_weather", "Returns the weather.", {"type": "object", "properties": {}})
    (answer,) = llm.chat([[{"role": "user", "content": "hello"}]], GREEDY, tools=[tool])
    assert "get_weather" in llm.tokenizer.decode(answer.prompt_token_ids)


def test_a_required_call_is_the_answer(llm: LLM) -> None:
    city = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    tools = [Tool("get_weather", "", {**city, "additionalProperties": False}), Tool("other", "", {"type": "object"})]
    question = [{"role": "user", "content": "hello"}]
    long = replace(GREEDY, max_tokens=300, ignore_eos=False)
    (answer,) = llm.chat([question], long, tools=tools, tool_choice="get_weather")
    assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == [
        ("get_weather", {"city": "Rome"})
    ]
    (answer,) = llm.chat([question], long, tools=tools[:1], tool_choice="required", parallel_tool_calls=False)
    assert [call.name for call in answer.tool_calls] == ["get_weather"]
    (answer,) = llm.chat([question], GREEDY, tools=tools, tool_choice="none")
    assert answer.tool_calls == ()
    assert "get_weather" not in llm.tokenizer.decode(answer.prompt_token_ids)
    named = {"type": "function", "function": {"name": "get_weather"}}
    (answer,) = llm.chat([question], long, tools=tools, tool_choice=named)
    assert [call.name for call in answer.tool_calls] == ["get_weather"]
    with pytest.raises(InvalidRequest, match="tool_choice must be auto, none, required, or the name of a tool"):
        llm.chat([question], GREEDY, tools=tools, tool_choice=[1])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="tool_choice is 'absent', which is not in tools"):
        llm.chat([question], GREEDY, tools=tools, tool_choice="absent")


def test_progress_is_shown_only_on_request(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["hello"], GREEDY)
    assert capsys.readouterr() == ("", "")
    llm.generate(["hello"], GREEDY, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "completions" in shown.err


def test_vectors_of_prompts(llm: LLM) -> None:
    both = llm.encode(["hello", [5, 6, 7]], pooling="mean", dimensions=10, progress=False)
    assert [out.embedding.shape for out in both] == [(10,), (10,)]
    assert both[1].prompt_token_ids == (5, 6, 7)
    assert float(np.linalg.norm(both[0].embedding)) == pytest.approx(1.0)
    assert LLM.embed is LLM.encode
    for prompts, options, field in (
        ([""], {"dimensions": 0}, "dimensions"),
        (["a"], {"dimensions": 49}, "dimensions"),
        (["a"], {"pooling": "max"}, "pooling"),
        (["a", []], {}, "prompt"),
        ([[1] * 100_000], {}, "prompt"),
        ([[10**6]], {}, "prompt"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            llm.encode(prompts, **options)  # type: ignore[arg-type]
        assert caught.value.field == field
        assert llm.engine.is_idle


def test_scores_of_pairs(llm: LLM) -> None:
    same, other = llm.score("hello", ["hello", "something else"])
    assert same == pytest.approx(1.0)
    assert -1.0 <= other < 0.999
    assert llm.score(["hello", "x"], ["something else", "x"]) == pytest.approx([other, 1.0])
    assert llm.score([5, 6], [5, 6]) == pytest.approx([1.0])
    for a, b in ((["a", "b"], ["a"]), ("a", []), ([], ["a"])):
        with pytest.raises(InvalidRequest, match="cannot be compared"):
            llm.score(a, b)


def test_more_prompts_than_the_engine_s_queue_holds(llm: LLM) -> None:
    one = SamplingParams(temperature=0.0, max_tokens=1)
    prompts = [[number % 200] for number in range(1100)]
    assert [out.prompt_token_ids for out in llm.generate(prompts, one)] == [tuple(prompt) for prompt in prompts]
    assert len(llm.encode(prompts)) == 1100
    with pytest.raises(InvalidRequest):
        llm.generate([*prompts, []], one)
    assert llm.engine.is_idle


OTHER = {
    "load_format": "dummy", "device": "cuda:1", "dtype": "int8", "weights": "float32", "numerics": "fast",
    "kernels": "torch", "cuda_graphs": "off", "kv_memory": 1 << 20, "gpu_memory_utilization": 0.25, "block_tokens": 32,
    "window_pages": "keep", "limits": SchedulerLimits(token_budget=77), "async_steps": "off", "speculation": "suffix",
    "threads": 3, "tensor_parallel": 2, "seed": 5, "adapters": {"a": "/folder"}, "adapter_slots": 3,
    "max_adapter_rank": 8, "adapter_memory": 1 << 20, "served_name": "another", "pin_share": 0.5,
    "retention_share": 0.125, "load_policy": "always", "stream_interval": 3, "max_model_len": 300,
}  # fmt: skip
"""A value other than the default of every setting of an engine."""
OTHER_LIMITS = {
    "token_budget": 77, "max_chunk_tokens": 7, "max_mixed_tokens": 9, "background_steps": 3, "max_num_seqs": 5,
    "scheduling": "srtf", "max_scored_rows": 8, "reserve_share": 0.2,
}  # fmt: skip


def test_every_argument_reaches_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(OTHER) == sorted(field.name for field in fields(EngineSettings) if field.name != "model")
    assert sorted([*OTHER_LIMITS, "class_weights"]) == sorted(field.name for field in fields(SchedulerLimits))
    found: list[EngineSettings] = []
    monkeypatch.setattr(LLM, "_load", lambda self, settings: found.append(settings))
    plain = EngineSettings("tiny")
    for name, value in OTHER.items():
        LLM("tiny", **{name: value})
        assert getattr(found[-1], name) != getattr(plain, name), name
    for name, value in OTHER_LIMITS.items():
        LLM("tiny", **{name: value})
        assert getattr(found[-1].limits, name) == value, name
    LLM("tiny", scheduling="weighted", class_weights="0=4")
    assert found[-1].limits.class_weights == "0=4"
