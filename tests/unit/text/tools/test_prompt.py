"""Conversations for templates of the harmony format: reasoning is `thinking`, null content is left out."""

from typing import Any

from kvferry.model import tiny
from kvferry.text.answers.registry import CallFormat
from kvferry.text.requests.answer_rules import AnswerParsers, answer_form
from kvferry.text.templates.chat_template import ChatTemplate
from kvferry.text.tools.conversations import encode_conversation

HARMONY = """{%- for message in messages -%}
{%- if "content" in message and "<|channel|>" in message.content -%}{{ raise_exception("channels") }}{%- endif -%}
{%- if message.tool_calls -%}
{%- if message.content and message.thinking -%}{{ raise_exception("both") }}{%- endif -%}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + (message.content or message.thinking or "") + "<|end|>" -}}
{%- set call = message.tool_calls[0].function -%}
{{- "<|start|>assistant to=functions." + call.name + "<|message|>" + call.arguments | tojson + "<|call|>" -}}
{%- else -%}
{{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" -}}
{%- endif -%}
{%- endfor -%}
{%- if tools and add_generation_prompt -%}<|start|>assistant{%- endif -%}"""
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"city": "Oslo"}}}]


def rendered(*messages: dict[str, Any]) -> str:
    tokenizer = tiny.tokenizer(tiny.config())
    ids = encode_conversation(ChatTemplate(HARMONY), tokenizer, messages)
    return b"".join(tokenizer.token_bytes(token) for token in ids).decode()


def test_reasoning_before_a_call_is_thinking() -> None:
    call = {"role": "assistant", "content": None, "reasoning_content": "I look it up.", "tool_calls": CALLS}
    assert rendered(call) == (
        "<|start|>assistant<|channel|>analysis<|message|>I look it up.<|end|>"
        '<|start|>assistant to=functions.f<|message|>{"city": "Oslo"}<|call|>'
    )


def test_content_beside_a_call_takes_its_place() -> None:
    call = {"role": "assistant", "content": "Wait.", "reasoning_content": "I look it up.", "tool_calls": CALLS}
    assert "<|message|>Wait.<|end|>" in rendered(call)
    assert "look" not in rendered(call)


def test_answers_of_such_models_are_split_by_channels() -> None:
    tokenizer = tiny.tokenizer(tiny.config())
    form = answer_form(ChatTemplate(HARMONY), tokenizer, AnswerParsers())
    assert (form.call_format, form.has_reasoning) == (CallFormat.HARMONY, True)
    assert not answer_form(ChatTemplate(HARMONY), tokenizer, AnswerParsers(reasoning="off")).has_reasoning
