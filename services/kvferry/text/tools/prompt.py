"""Writes tools, calls and results as text, for chat templates that do not support tools.

The format is the one of the Hermes models: tools in the system message, calls in `<tool_call>`, results in
`<tool_response>`. Many models were trained with it, and `answers.json_calls` reads it.
"""

import json
from collections.abc import Mapping, Sequence

from kvferry.core.inference.tools import Tool
from kvferry.text.templates.chat_template import ChatTemplate
from kvferry.text.tokenizing.tokenizer import Tokenizer
from kvferry.text.tools.chat import encode_chat
from kvferry.text.tools.history import Message

_THINKING = "message.thinking"
"""String by which templates of the harmony format are recognized."""
_INSTRUCTIONS = """You can call functions. Each line between <tools> and </tools> describes one function as JSON, with \
a JSON schema of its arguments:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and its arguments between <tool_call> and </tool_call>, and \
nothing after it; to call several functions, write one such part for each:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>

You then get the results between <tool_response> and </tool_response>. If none is needed, answer in plain text."""


def encode_conversation(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    variables: Mapping[str, object] | None = None,
) -> list[int]:
    """Render and encode a conversation with the tools that are offered, whether or not the template supports tools.

    Args:
        template: the chat template.
        tokenizer: tokenizer of the model.
        messages: messages of the conversation, oldest first.
        tools: the tools that are offered.
        variables: further variables of the template; see `ChatTemplate.render`.

    Raises:
        InvalidRequest: see `chat.encode_chat`.
    """
    if not template.uses_tools:
        return encode_chat(template, tokenizer, as_text(messages, tools), variables=variables)
    if _THINKING in template.source:
        messages = [_with_thinking(message) for message in messages]
    described = [tool.as_template_input() for tool in tools] or None
    return encode_chat(template, tokenizer, messages, tools=described, variables=variables)


def _with_thinking(message: Message) -> Message:
    """Return a message in the form that harmony templates read: `reasoning_content` becomes `thinking`, and is dropped
    if the message has both content and calls; null fields are dropped."""
    named = {key: value for key, value in message.items() if key != "reasoning_content" and value is not None}
    reasoning = message.get("reasoning_content")
    if reasoning and not (message.get("content") and message.get("tool_calls")):
        named["thinking"] = reasoning
    return named


def as_text(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return the conversation with tools, calls and results written as message text.

    Args:
        messages: messages in the form that templates expect.
        tools: tools that the model may call.
    """
    plain: list[Message] = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{message.get('content') or ''}\n</tool_response>")
            continue
        _add_results(plain, results)
        plain.append(_as_text(message))
    _add_results(plain, results)
    return _instructed(plain, tools) if tools else plain


def _add_results(messages: list[Message], results: list[str]) -> None:
    """Append consecutive results as one user message."""
    if results:
        messages.append({"role": "user", "content": "\n".join(results)})
        results.clear()


def _instructed(messages: list[Message], tools: Sequence[Tool]) -> list[Message]:
    lines = "\n".join(json.dumps(tool.as_template_input(), ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=lines)
    if messages and messages[0]["role"] == "system":
        first, *rest = messages
        return [{**first, "content": f"{first['content']}\n\n{instructions}"}, *rest]
    return [{"role": "system", "content": instructions}, *messages]


def _as_text(message: Message) -> Message:
    content = str(message.get("content") or "")
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    written = [_call(call["function"]) for call in calls]
    return {"role": message["role"], "content": "\n".join([content, *written] if content else written)}


def _call(function: Mapping[str, object]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
