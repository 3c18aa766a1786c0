"""Chats with functions: prompts, reasoning that the prompt opens, constraints; and their gRPC messages."""

import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
import pytest
from harness.fakes.scripted_answers import answering_api

from kvferry.client import AsyncClient, Client, Tool, ToolCall
from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest, UsageError
from kvferry.core.inference.tools import ToolMode, ToolUse
from kvferry.core.sampling import FinishReason, SamplingParams
from kvferry.model import tiny
from kvferry.model.source import ModelSource
from kvferry.rpc.channel import open_channel
from kvferry.rpc.errors import error_from_rpc
from kvferry.serving.model_text import text_model_of
from kvferry.serving.prompts import BlocksEventLoop, encode_chat, prepare_chat
from kvferry.serving.text_model import TextModel
from kvferry.text.answers.registry import CallFormat
from kvferry.text.grammar.compiler import GrammarCompiler
from kvferry.text.requests.answer_rules import AnswerParsers
from kvferry.text.templates.chat_template import ChatTemplate
from kvferry.v1 import inference_pb2, inference_pb2_grpc

TOOLS = (
    Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    Tool("now"),
)
USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def test_large_schemas_of_a_call_are_not_prepared_on_the_event_loop() -> None:
    names = {f"{number:060}": True for number in range(60)}
    large = Tool("f", "", {"type": "object", "properties": names, "additionalProperties": {"type": "integer"}})
    model = model_with("{{ messages[0].content }}")
    required = ToolUse((large,), ToolMode.REQUIRED)
    answer = SamplingParams(constraint=Constraint(ConstraintKind.JSON_OBJECT, ""))
    for use, sampling in ((required, SamplingParams()), (ToolUse((large,)), answer)):
        with pytest.raises(BlocksEventLoop):
            prepare_chat(model, USER, use, sampling)
        assert prepare_chat(replace(model, is_off_loop=True), USER, use, sampling).sampling.constraint is not None
    prepare_chat(model, USER, ToolUse((large,)), SamplingParams())  # no grammar is made
    prepare_chat(model, USER, ToolUse(TOOLS, ToolMode.REQUIRED), SamplingParams())


def model_with(template: str, **parsers: str) -> TextModel:
    config = tiny.config()
    tensors = tiny.TinyTensors(config)
    source = ModelSource(config, tiny.tokenizer(config), ChatTemplate(template), tensors, tensors.digest)
    return text_model_of(source, AnswerParsers(**parsers))


def text_of(model: TextModel, ids: Sequence[int]) -> str:
    return model.tokenizer.decode(ids)


def test_a_template_with_tools_gets_them_and_arguments_as_an_object():
    template = (
        "{% for t in tools %}{{ t.function.name }}:{{ t.function.parameters | tojson }};{% endfor %}"
        "{% for m in messages %}{{ m.role }}={{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments.a }}{% endfor %}"
        "{% if m.role == 'tool' %}{{ m.name }}{{ m.tool_call_id }}{% endif %};{% endfor %}"
    )
    model = model_with(template)
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": {"a": 5}}}
    messages = [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "6"},
    ]
    text = text_of(model, encode_chat(model, messages, ToolUse(TOOLS)))
    assert text.startswith('add:{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]};now:')
    assert text.endswith("user=hi;assistant=add5;tool=6addx;")


@pytest.mark.parametrize(
    ("template", "uses"),
    [
        ("{{ tools }}", True),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ messages }}", True),
        ("{{ messages[0].tools }} tools {# tools #}", False),
        ("{% set tools = 1 %}{{ tools }}", False),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
    ],
)
def test_whether_a_template_uses_tools_is_known_from_its_variables(template, uses):
    assert ChatTemplate(template).uses_tools is uses


def test_a_template_without_tools_gets_them_as_text():
    model = model_with("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": {"a": 5}}}
    calls = [call, {**call, "id": "y"}]
    messages = [
        *USER,
        {"role": "assistant", "content": "ok", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "y", "content": "7"},
        {"role": "tool", "tool_call_id": "x", "content": "6"},
        *USER,
    ]
    text = text_of(model, encode_chat(model, messages, ToolUse(TOOLS)))
    assert text.startswith("[system] You can call functions.")
    assert '{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters":' in text
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 5}}\n</tool_call>'
    assert f"[assistant] ok\n{written}\n{written}\n" in text
    results = "<tool_response>\n7\n</tool_response>\n<tool_response>\n6\n</tool_response>"
    assert text.endswith(f"[user] {results}\n[user] hi\n")
    assert "functions" not in text_of(model, encode_chat(model, USER, ToolUse(TOOLS, ToolMode.NONE)))


@pytest.mark.parametrize(
    ("template", "parsers", "expected", "reasons"),
    [
        ("{{ messages }}", {}, CallFormat.HERMES, False),
        ("{{ messages }}[TOOL_CALLS]", {}, CallFormat.HERMES, False),
        ("{{ tools }}[TOOL_CALLS]", {}, CallFormat.MISTRAL, False),
        ("{{ tools }}<|python_tag|>", {}, CallFormat.LLAMA3_JSON, False),
        ("{{ tools }}", {"tool_calls": "pythonic"}, CallFormat.PYTHONIC, False),
        ("{{ tools }}<tool_call><think>", {}, CallFormat.HERMES, True),
        ("{{ tools }}<think>", {"reasoning": "off"}, CallFormat.HERMES, False),
        ("{{ tools }}", {"reasoning": "think"}, CallFormat.HERMES, True),
    ],
)
def test_the_answer_form_follows_template_and_parsers(template, parsers, expected, reasons):
    form = model_with(template, **parsers).answer_form
    assert (form.call_format, form.has_reasoning) == (expected, reasons)


def test_a_format_that_the_template_does_not_teach_is_refused():
    with pytest.raises(UsageError, match="use auto"):
        model_with("{{ messages }}", tool_calls="mistral")


@pytest.mark.parametrize(("ending", "is_open"), [("<think>\n", True), ("<think>", True), ("<think>x", False)])
def test_the_prompt_may_open_the_reasoning(ending, is_open):
    model = model_with("{{ messages[0].content }}" + ending)
    chat = prepare_chat(model, USER, ToolUse(), SamplingParams())
    assert chat.split is not None
    assert chat.split.is_reasoning_open is is_open


@pytest.mark.parametrize(("ending", "thought"), [("<think>", "x</think>"), ("", "<think>x</think>")])
def test_a_constraint_holds_for_the_text_after_the_reasoning(ending, thought):
    params = SamplingParams(constraint=Constraint(ConstraintKind.CHOICE, '["yes"]'))
    model = model_with("{% if false %}<think>{% endif %}{{ messages[0].content }}" + ending)
    chat = prepare_chat(model, USER, ToolUse(), params)
    assert chat.sampling.constraint is not None
    tokenizer = tiny.tokenizer(tiny.config())
    state = GrammarCompiler(tokenizer).compile(chat.sampling.constraint).start()
    state.advance(tokenizer.encode(thought + "yes", add_special=False))
    assert state.is_accepting
    assert not state.allowed()[ord("x")]


def test_answers_are_split_only_if_needed():
    assert prepare_chat(model_with("{{ messages }}"), USER, ToolUse(), SamplingParams()).split is None


def test_functions_count_towards_the_length_of_the_prompt():
    with pytest.raises(InvalidRequest, match="characters"):
        prepare_chat(
            model_with("{{ messages }}"),
            USER,
            ToolUse(tuple(Tool(f"f{n}", "x" * 10_000) for n in range(10))),
            SamplingParams(),
        )


async def test_calls_over_grpc_with_the_asynchronous_client():
    async with answering_api(CallFormat.HERMES, has_reasoning=True) as api, AsyncClient(api.grpc) as client:
        api.source.answers = (f"<think>hm</think>ok {CALL}{CALL}",)
        (answer,) = await client.complete(USER, tools=TOOLS)
        assert (answer.reasoning, answer.text, answer.finish_reason) == ("hm", "ok", FinishReason.STOP)
        assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == [("add", {"a": 1})] * 2
        history = [
            *USER,
            {"role": "assistant", "content": answer.text, "reasoning": "hm", "tool_calls": answer.tool_calls},
            *({"role": "tool", "tool_call_id": call.call_id, "content": "2"} for call in answer.tool_calls),
        ]
        api.source.answers = ("It is 2.",)
        async with aclosing(client.generate(history, tools=TOOLS)) as chunks:
            assert "".join([chunk.text async for chunk in chunks]) == "It is 2."
        assert api.source.prompt.count("<tool_response>\n2\n</tool_response>") == 2
        assert len(await client.tokenize(history)) < len(api.source.requests[-1].token_ids)
        (one,) = await client.complete("text is not split", SamplingParams(max_tokens=9))
        assert (one.text, one.tool_calls) == ("It is 2.", ())


async def test_reasoning_over_grpc_is_counted_and_its_budget_checked():
    async with answering_api(CallFormat.HERMES, has_reasoning=True) as api, AsyncClient(api.grpc) as client:
        api.source.answers = ("<think>abc</think>yes",)
        (answer,) = await client.complete(USER)
        assert (answer.reasoning, answer.text) == ("abc", "yes")
        assert answer.usage.reasoning_tokens == len(">abc</think>")
        with pytest.raises(InvalidRequest, match="since <think>, </think> is text"):
            await client.complete(USER, max_reasoning_tokens=5)
        with pytest.raises(InvalidRequest, match="needs a conversation"):
            await client.complete("text", max_reasoning_tokens=5)


async def test_choices_over_grpc():
    async with answering_api(CallFormat.HERMES) as api, AsyncClient(api.grpc) as client:
        api.source.answers = (CALL + CALL,)
        (answer,) = await client.complete(USER, tools=TOOLS, tool_choice="add")
        constraint = api.source.requests[-1].sampling.constraint
        assert constraint is not None
        assert "add" in constraint.source
        assert "now" not in constraint.source
        assert len(answer.tool_calls) == 1
        (answer,) = await client.complete(USER, tools=TOOLS, parallel_tool_calls=False)
        assert len(answer.tool_calls) == 1
        allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
        await client.complete(USER, tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
        constraint = api.source.requests[-1].sampling.constraint
        assert constraint is not None
        assert "now" in constraint.source
        assert 'add\\"' not in constraint.source
        assert all(name in api.source.prompt for name in ("add", "now")), "the others stay in the prompt"
        (answer,) = await client.complete(USER, tools=TOOLS, tool_choice="none")
        assert (answer.tool_calls, answer.text) == ((), CALL + CALL)


def call_of(**fields: Any) -> inference_pb2.ChatMessage:
    return inference_pb2.ChatMessage(content="x", **fields)


def chat_of(*messages: inference_pb2.ChatMessage, **fields: Any) -> inference_pb2.Chat:
    return inference_pb2.Chat(messages=messages or [inference_pb2.ChatMessage(role="user", content="x")], **fields)


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        (chat_of(call_of(role="user", tool_call_id="x")), "messages.0.tool_call_id"),
        (chat_of(call_of(role="user", name="x")), "messages.0.name"),
        (chat_of(call_of(role="tool", tool_call_id="x")), "messages.0.tool_call_id"),
        (chat_of(call_of(role="user", tool_calls=[inference_pb2.ToolCall(id="x")])), "messages.0.tool_calls"),
        (chat_of(call_of(role="assistant", tool_calls=[inference_pb2.ToolCall()] * 129)), "messages.0.tool_calls"),
        (chat_of(tools=[inference_pb2.Tool(name="a b")]), "tools.0.function.name"),
        (chat_of(tools=[inference_pb2.Tool(name="f")] * 129), "tools"),
        (chat_of(tools=[inference_pb2.Tool(name="f", parameters="[1]")]), "tools.0.function.parameters"),
        (chat_of(tools=[inference_pb2.Tool(name="f", parameters="{" * 9)]), "tools.0.function.parameters"),
        (chat_of(tools=[inference_pb2.Tool(name="f", parameters=" " * (1 << 18))]), "tools.0.function.parameters"),
        (chat_of(tool_choice=inference_pb2.ToolChoice(mode=inference_pb2.ToolChoice.MODE_REQUIRED)), "tool_choice"),
        (chat_of(tool_choice=inference_pb2.ToolChoice(mode=9)), "tool_choice"),  # type: ignore[arg-type]
        (chat_of(tool_choice=inference_pb2.ToolChoice(function="f")), "tool_choice"),
        (chat_of(tool_choice=inference_pb2.ToolChoice(allowed=["f"])), "tool_choice"),
    ],
)
async def test_bad_chats_are_refused_by_field(chat, field):
    async with answering_api(CallFormat.HERMES) as api, open_channel(api.grpc) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest(chat=chat))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert error_from_rpc(caught.value).field == field


def test_the_client_refuses_functions_without_a_conversation():
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest, match="conversation"):
        client.complete("text", tools=TOOLS)
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest, match="not in tools"):
        client.complete(USER, tools=TOOLS, tool_choice="other")
    assert ToolCall("x", "f", "{}").arguments == "{}"
