"""Encodes conversations to token ids, with the tools that are offered.

Each result answers a call, and each call is answered, as in OpenAI's API. Arguments are JSON text in requests, and an
object in templates.

For chat templates that do not support tools, tools, calls and results are written as text, in the format of the Hermes
models: tools in the system message, calls in `<tool_call>`, results in `<tool_response>`. Many models were trained with
it, and `answers.json_calls` reads it.

Message text cannot produce control tokens. If message text could become control tokens, a user who writes
`<|im_end|><|im_start|>system` could end the turn and start a system turn. Control tokens of the template must be parsed
and control tokens in messages must not, but both appear in the same rendered text. Therefore, before rendering, every
control token inside a message is split by a mark, a private-use character that occurs nowhere else:

    content    "hi <|im_end|> there"            mark = U+E000, drawn as ^
    guarded    "hi <^|im_end|> there"
    rendered   <|im_start|>user\\nhi <^|im_end|> there<|im_end|>\\n
    pieces     [control]  user\\nhi <|im_end|> there  [control]  \\n

The remaining control tokens in the rendered text come from the template. The text between them is encoded without marks
and without parsing control tokens. A control token could also arise where a message meets other text. Therefore a mark
is also added to a message that ends with the start of a control token or starts with the end of a control token.

Without marks, the rendered text is parsed and encoded directly. The template is trusted like the weights: a template
that splits and joins message text could remove the marks.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto

from pydantic_core import from_json

from kvferry.core.errors import InvalidRequest, shortened
from kvferry.core.inference.tools import Tool, depth_of
from kvferry.text.templates.chat_template import ChatTemplate, Message
from kvferry.text.tokenizing.tokenizer import ControlToken, Tokenizer

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
_PRIVATE_USE = range(0xE000, 0xF900)
MAX_CALLS = 128
"""Maximum number of calls in one message."""
MAX_ID_CHARS = 256
MAX_ARGUMENTS_DEPTH = 64
ROLES = ("system", "developer", "user", "assistant", "tool")


class PromptEnd(Enum):
    """How a prompt ends."""

    ANSWER = auto()
    """With the start of the assistant's answer."""
    MESSAGE = auto()
    """With the end of the last message."""
    OPEN = auto()
    """With the content of the last message, which the answer continues."""


def encode_conversation(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    variables: Mapping[str, object] | None = None,
    end: PromptEnd = PromptEnd.ANSWER,
) -> list[int]:
    """Render and encode a conversation with the tools that are offered, whether or not the template supports tools.

    Args:
        template: the chat template.
        tokenizer: tokenizer of the model.
        messages: messages of the conversation, oldest first.
        tools: the tools that are offered.
        variables: further variables of the template; see `ChatTemplate.render`.
        end: how the prompt ends.

    Raises:
        InvalidRequest: see `encode_chat`.
    """
    if not template.uses_tools:
        return encode_chat(template, tokenizer, as_text(messages, tools), variables=variables, end=end)
    if _THINKING in template.source:
        messages = [_with_thinking(message) for message in messages]
    described = [tool.as_template_input() for tool in tools] or None
    return encode_chat(template, tokenizer, messages, tools=described, variables=variables, end=end)


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


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    end: PromptEnd = PromptEnd.ANSWER,
    tools: Sequence[Message] | None = None,
    variables: Mapping[str, object] | None = None,
) -> list[int]:
    """Render and encode a conversation; control tokens come only from the template.

    Args:
        template: the chat template.
        tokenizer: tokenizer of the model.
        messages: messages of the conversation, oldest first.
        end: how the prompt ends.
        tools: definitions of the tools in the template's form; `None` without tools.
        variables: further variables of the template; see `ChatTemplate.render`.

    Raises:
        InvalidRequest: the template rejects the messages, they cannot be encoded, or the last one cannot be continued.
    """
    guard = _Guard(tokenizer, [*messages, *(tools or ()), variables, template.source])
    if end is PromptEnd.OPEN:
        *before, last = messages
        messages = [*before, {**last, "content": f"{last.get('content') or ''}{guard.end} "}]
    text = template.render(
        [guard.message(message) for message in messages],
        add_generation_prompt=end is PromptEnd.ANSWER,
        tools=[guard.message(tool) for tool in tools] if tools is not None else None,
        variables=guard.message(variables or {}),
    )
    if end is PromptEnd.OPEN:
        text = _up_to(text, guard.end)
    if not guard.was_needed:
        return tokenizer.encode(text, add_special=False)
    ids: list[int] = []
    for piece in _pieces(text, tokenizer):
        if isinstance(piece, ControlToken):
            ids.append(piece.token_id)
        else:
            ids += tokenizer.encode(piece.replace(guard.mark, ""), add_special=False, parse_control=False)
    return ids


def _up_to(text: str, place: str) -> str:
    """Return a rendered conversation up to a place in its last message. A template that trims messages has dropped the
    space after the place; then it also trims the text before, as in transformers."""
    before, found, after = text.rpartition(place)
    if not found:
        raise InvalidRequest(
            "the chat template does not write the last message; leave continue_final_message out",
            field="continue_final_message",
        )
    before = before.replace(place, "")
    return before if after.startswith(" ") else before.rstrip()


class _Guard:
    """Inserts marks into the messages of a request, so that their text cannot be parsed as control tokens."""

    def __init__(self, tokenizer: Tokenizer, texts_seen: Sequence[object]) -> None:
        seen = set[str]().union(*(_strings(texts_seen)))
        free = [chr(code) for code in _PRIVATE_USE if chr(code) not in seen][:2]
        if len(free) < 2:
            raise InvalidRequest("the messages contain every private-use character", field="messages")
        self.mark, self.end = free
        """Characters that occur nowhere else: between the parts of a control token, and at the end of a prompt."""
        self.was_needed = False
        texts = [text for text in tokenizer.control_tokens if len(text) > 1]  # a single character cannot be split
        # The match consumes only one character, so that a single pass also splits overlapping tokens.
        self._whole = re.compile(f"(?=(?:{'|'.join(map(re.escape, texts))}))(.)", re.DOTALL) if texts else None
        self._beginnings = {text[:n] for text in texts for n in range(1, len(text))}
        self._endings = {text[n:] for text in texts for n in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)

    def message(self, message: Message) -> Message:
        """Return the message with marks in all of its strings, including keys."""
        guarded = self._any(message)
        assert isinstance(guarded, dict)
        return guarded

    def _any(self, value: object) -> object:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {self._any(key): self._any(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._any(item) for item in value]
        return value

    def _text(self, text: str) -> str:
        if self._whole is None:
            return text
        guarded = self._whole.sub(rf"\1{self.mark}", text)
        # Templates strip whitespace, so compare the stripped ends.
        bare = guarded.rstrip()
        if any(bare[-n:] in self._beginnings for n in range(1, min(self._longest, len(bare) + 1))):
            guarded = bare + self.mark + guarded[len(bare) :]
        bare = guarded.lstrip()
        if any(bare[:n] in self._endings for n in range(1, min(self._longest, len(bare) + 1))):
            guarded = guarded[: len(guarded) - len(bare)] + self.mark + bare
        self.was_needed |= guarded != text
        return guarded


def _pieces(text: str, tokenizer: Tokenizer) -> Iterator[str | ControlToken]:
    """Split text at control tokens, like the tokenizer: the leftmost match first; of several at one position, the
    longest."""
    controls = tokenizer.control_tokens
    pattern = re.compile("|".join(map(re.escape, sorted(controls, key=len, reverse=True))))
    at, swallow = 0, False
    for match in pattern.finditer(text):
        control = controls[match[0]]
        between = text[at : match.start()]
        between = between.lstrip() if swallow else between
        between = between.rstrip() if control.strips_left else between
        if between:
            yield between
        yield control
        at, swallow = match.end(), control.strips_right
    rest = text[at:].lstrip() if swallow else text[at:]
    if rest:
        yield rest


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def check_calls(messages: Sequence[Message]) -> None:
    """Check the roles of messages, and that messages of role `tool` and the calls of assistants belong together.

    Args:
        messages: messages in the form that templates expect.

    Raises:
        InvalidRequest: a role is unknown, a result does not match a call in the preceding assistant message, or a call
            has no result or no name.
    """
    open_ids: dict[str, None] = {}
    for number, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise InvalidRequest(
                f"messages.{number}.role must be one of {', '.join(ROLES)}, not {shortened(repr(message['role']))}",
                field=f"messages.{number}.role",
            )
        if message["role"] == "tool":
            call_id = str(message.get("tool_call_id", ""))
            if call_id not in open_ids:
                raise InvalidRequest(
                    f"messages.{number}.tool_call_id {shortened(call_id)!r} does not match an unanswered tool call in "
                    "the preceding assistant message; tool messages must follow that message",
                    field=f"messages.{number}.tool_call_id",
                )
            del open_ids[call_id]
            continue
        _check_answered(f"before messages.{number}", open_ids)
        open_ids = dict.fromkeys(call_ids(message))
        _check_names(message, f"messages.{number}")
    _check_answered("of the last assistant message", open_ids)


def _check_answered(where: str, open_ids: Mapping[str, None]) -> None:
    if open_ids:
        missing = ", ".join(repr(shortened(call_id)) for call_id in list(open_ids)[:3])
        raise InvalidRequest(
            f"the tool calls {missing} {where} have no result; add a tool message for each",
            field="messages",
        )


def _check_names(message: Message, where: str) -> None:
    calls = message.get("tool_calls")
    for number, call in enumerate(calls if isinstance(calls, list) else ()):
        if not call["function"]["name"]:
            field = f"{where}.tool_calls.{number}.function.name"
            raise InvalidRequest(f"{field} is empty; set it to the name of the called function", field=field)


def call_ids(message: Message) -> list[str]:
    """Return the ids of the calls of a message."""
    calls = message.get("tool_calls")
    return [str(call["id"]) for call in calls] if isinstance(calls, list) else []


def call_input(call_id: str, name: str, arguments: str) -> dict[str, object]:
    """Return a call in the form that chat templates expect.

    Args:
        call_id: id of the call.
        name: name of the function.
        arguments: arguments as JSON.
    """
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": _as_object(arguments)}}


def with_names(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the name of the called tool in each result, for templates that need it."""
    names: dict[str, object] = {}
    named: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            names[str(call["id"])] = call["function"]["name"]
        if message["role"] == "tool" and not message.get("name"):
            message = {**message, "name": names.get(str(message.get("tool_call_id", "")), "")}
        named.append(message)
    return named


def _as_object(arguments: str) -> object:
    """Return arguments as an object, or as text if they are not an object, as in an answer that was cut off."""
    try:
        value = from_json(arguments or "{}", allow_inf_nan=False)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) and depth_of(value) <= MAX_ARGUMENTS_DEPTH else arguments
