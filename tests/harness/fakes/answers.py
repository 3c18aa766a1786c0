"""Writes answers as models do, and splits whole answers with ids of calls that are easy to read."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from kvferry.text.answers.answer import AnswerForm, AnswerSplitter, SplitOptions
from kvferry.text.answers.marks import Marks
from kvferry.text.answers.registry import CallFormat

NAMES = ("f", "g", "get_weather")


def split(
    call_format: CallFormat,
    pieces: Iterable[str],
    *,
    names: tuple[str, ...] = NAMES,
    has_reasoning: bool = False,
    marks: Marks | None = None,
    **split: Any,
) -> tuple[str, str, list[tuple[str, str, str]]]:
    """Return content, reasoning, and (id, name, arguments) of each call; ids end in the number of the call, from 1.

    Raises:
        AssertionError: a delta contradicts the rules of OpenAI's streams.
    """
    numbers = count(1)
    form = AnswerForm(call_format, has_reasoning, marks or Marks())
    splitter = AnswerSplitter(form, SplitOptions(names, **split), lambda size: str(next(numbers)))
    content, reasoning = "", ""
    calls: list[tuple[str, str, str]] = []
    for parts in [*map(splitter.feed, pieces), splitter.finish()]:
        content += parts.content
        reasoning += parts.reasoning
        for delta in parts.calls:
            if delta.name:
                assert delta.index == len(calls), "calls begin in order"
                assert delta.call_id
                calls.append((delta.call_id, delta.name, delta.arguments))
            else:
                assert not delta.call_id
                assert delta.arguments
                call_id, name, arguments = calls[delta.index]
                calls[delta.index] = (call_id, name, arguments + delta.arguments)
    return content, reasoning, calls


def written(
    call_format: CallFormat, calls: Sequence[tuple[str, Mapping[str, object]]], *, has_types: bool = False
) -> str:
    """Write calls as a model would; strings have no quotes in XML if the reader knows the types of arguments."""
    if call_format is CallFormat.HERMES:
        return "\n".join(f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)
    if call_format is CallFormat.LLAMA3_JSON:
        return "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)
    if call_format is CallFormat.MISTRAL:
        return f"[TOOL_CALLS]{json.dumps([{'name': n, 'arguments': a} for n, a in calls])}"
    if call_format in (CallFormat.GRANITE, CallFormat.PHI4):
        closer = "<|/tool_call|>" if call_format is CallFormat.PHI4 else ""
        return f"<|tool_call|>{json.dumps([{'name': n, 'arguments': a} for n, a in calls])}{closer}"
    if call_format in (CallFormat.DEEPSEEK_V3, CallFormat.DEEPSEEK_V31):
        return _deepseek(calls, has_fence=call_format is CallFormat.DEEPSEEK_V3)
    if call_format is CallFormat.OLMO3:
        lines = "\n".join(f"{n}({_python(a)})" for n, a in calls)
        return f"<function_calls>{lines}</function_calls>"
    if call_format is CallFormat.QWEN3_CODER:
        return "\n".join(
            f"<tool_call>\n<function={n}>\n{_elements(a, has_types)}</function>\n</tool_call>" for n, a in calls
        )
    if call_format is CallFormat.FUNCTIONGEMMA:
        return "".join(f"<start_function_call>call:{n}{_escaped(a)}<end_function_call>" for n, a in calls)
    if call_format is CallFormat.HARMONY:
        head = "<|channel|>commentary to=functions."
        return "<|start|>assistant".join(
            f"{head}{n} <|constrain|>json<|message|>{json.dumps(a)}<|call|>" for n, a in calls
        )
    return f"[{', '.join(f'{n}({_python(a)})' for n, a in calls)}]"


def _escaped(value: object) -> str:
    if isinstance(value, str):
        return f"<escape>{value}<escape>"
    if isinstance(value, Mapping):
        keys = {key: key if key.isidentifier() else _escaped(key) for key in value}
        return "{" + ",".join(f"{keys[key]}:{_escaped(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_escaped, value)) + "]"
    return json.dumps(value)


def _python(arguments: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


def _deepseek(calls: Sequence[tuple[str, Mapping[str, object]]], *, has_fence: bool) -> str:
    made = [
        f"function<｜tool▁sep｜>{n}\n```json\n{json.dumps(a)}\n```"
        if has_fence
        else f"{n}<｜tool▁sep｜>{json.dumps(a)}"
        for n, a in calls
    ]
    between = "\n" if has_fence else ""
    tagged = between.join(f"<｜tool▁call▁begin｜>{each}<｜tool▁call▁end｜>" for each in made)
    return f"<｜tool▁calls▁begin｜>{tagged}<｜tool▁calls▁end｜>"


def _elements(arguments: Mapping[str, object], has_types: bool) -> str:
    texts = {
        key: value if has_types and isinstance(value, str) else json.dumps(value) for key, value in arguments.items()
    }
    return "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
