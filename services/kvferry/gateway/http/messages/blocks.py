"""Messages and content blocks of the Messages API, and their conversion to messages for the chat template."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from kvferry.core.errors import InvalidRequest, shortened
from kvferry.gateway.http.fields import field_policy
from kvferry.gateway.http.fields.cache_fields import CacheControl
from kvferry.gateway.http.fields.field_policy import Rules
from kvferry.gateway.http.fields.strict import MAX_PARTS, Strict
from kvferry.text.tools.conversations import MAX_ID_CHARS

_SEPARATOR = "\n"
"""Between the text blocks of a user's or system message, and of a tool's result."""
_ERROR = "Error: "
"""Before the text of a tool's result with `is_error`, since chat templates have no such field."""
_BILLING = re.compile(r"x-anthropic-billing-header:(?: (?:cc_[a-z_]{1,32}|cch)=[\w.-]{1,64};)+\s?", re.ASCII)
"""A system block that holds the client's version and a nonce per request, and no instructions."""
_ALLOWED: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
"""Types of blocks by the role of their message."""

Id = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]


class _Block(Strict):
    cache_control: CacheControl | None = None


class TextBlock(_Block):
    """Text of a message, of the system prompt or of a tool's result."""

    RULES: ClassVar[Rules] = field_policy.TEXT_BLOCK

    type: Literal["text"]
    text: str


class ToolUseBlock(_Block):
    """A call of a tool in an assistant's message."""

    RULES: ClassVar[Rules] = field_policy.CALL_BLOCK

    type: Literal["tool_use"]
    id: Id
    name: str
    input: dict[str, Any]


class ToolResultBlock(_Block):
    """The result of a call."""

    RULES: ClassVar[Rules] = field_policy.CALL_BLOCK

    type: Literal["tool_result"]
    tool_use_id: Id
    content: str | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    is_error: bool | None = None


class ThinkingBlock(_Block):
    """Reasoning of an assistant's message, as in an answer. The signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Block):
    """Encrypted reasoning of another server; left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")],
    Discriminator(lambda block: f"<{block.get('type') if isinstance(block, dict) else getattr(block, 'type', '')}>"),
]
SystemPrompt = str | Annotated[list[TextBlock], Field(fail_fast=True)]


class ConversationMessage(Strict):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]


def block_marks(system: SystemPrompt | None, messages: Sequence[ConversationMessage]) -> list[CacheControl | None]:
    """Return the marks of a conversation's blocks that ask the cache to keep the prompt.

    Args:
        system: the system prompt; `None` for none.
        messages: the messages.
    """
    contents = [system, *(message.content for message in messages)]
    blocks: list[_Block] = [block for content in contents if isinstance(content, list) for block in content]
    results = [block.content for block in blocks if isinstance(block, ToolResultBlock)]
    blocks += [block for content in results if isinstance(content, list) for block in content]
    return [block.cache_control for block in blocks]


def check_blocks(fields: Mapping[str, Any]) -> None:
    """Refuse blocks of types that the conversation cannot have; the error names the type.

    Args:
        fields: the body, of which only the sizes were checked.

    Raises:
        InvalidRequest: a block is an image, for example, or does not belong to messages of its role.
    """
    _check_types("system", fields.get("system"), _ALLOWED["system"], "the system prompt")
    messages = fields.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            return  # an error of the validation
        role, content, where = message.get("role"), message.get("content"), f"messages.{number}.content"
        if not isinstance(role, str) or role not in _ALLOWED:
            field = f"messages.{number}.role"
            raise InvalidRequest(f"{field} must be one of {', '.join(_ALLOWED)}", field=field)
        _check_types(where, content, _ALLOWED[role], f"a message of role {role}")
        for index, block in enumerate(content if isinstance(content, list) else ()):
            if isinstance(block, dict) and block.get("type") == "tool_result":
                _check_types(f"{where}.{index}.content", block.get("content"), ("text",), "a tool_result")


def _check_types(where: str, blocks: object, allowed: Sequence[str], owner: str) -> None:
    for number, block in enumerate(blocks if isinstance(blocks, list) else ()):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in allowed:
            field = f"{where}.{number}.type"
            problem = f"{shortened(kind)!r} is not supported" if isinstance(kind, str) else "is missing"
            raise InvalidRequest(f"{field} {problem} in {owner}; use {', '.join(allowed)}", field=field)


@dataclass(slots=True)
class _Turn:
    """Consecutive blocks that form one message for the chat template."""

    role: str
    place: str
    """Path of the first message in the request."""
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    call_id: str | None = None

    def message(self) -> dict[str, Any]:
        text = ("" if self.role == "assistant" else _SEPARATOR).join(self.texts)
        message: dict[str, Any] = {"role": self.role, "content": text}
        if self.calls:
            message["tool_calls"] = self.calls
            message["content"] = text or None
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.call_id is not None:
            message["tool_call_id"] = self.call_id
        return message


def conversation(
    system: SystemPrompt | None, messages: Sequence[ConversationMessage]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Convert a conversation to messages of a chat request; return them, and for each the path of its first block's
    message in the request.

    Consecutive messages of one role become one message. A user's tool results precede the user's text. System blocks
    that hold only a client's billing header are left out: it changes with each request, and a prompt that begins with
    it would never be found in a cache.

    Args:
        system: the system prompt; `None` for none.
        messages: the messages, whose blocks belong to their roles.
    """
    turns: list[_Turn] = []
    instructions = [text for text in _texts(system) if not _BILLING.fullmatch(text)]
    if instructions:
        turns.append(_Turn("system", "system", instructions))
    for number, message in enumerate(messages):
        place = f"messages.{number}"
        blocks = message.content if isinstance(message.content, list) else []
        results = [block for block in blocks if isinstance(block, ToolResultBlock)]
        turns += [_Turn("tool", place, [_result(block)], call_id=block.tool_use_id) for block in results]
        if results and len(results) == len(blocks):
            continue
        if not turns or turns[-1].role != message.role:
            turns.append(_Turn(message.role, place))
        _add(turns[-1], message.content)
    return [turn.message() for turn in turns], [turn.place for turn in turns]


def _add(turn: _Turn, content: str | Sequence[Any]) -> None:
    for block in [content] if isinstance(content, str) else content:
        match block:
            case str():
                turn.texts.append(block)
            case TextBlock():
                turn.texts.append(block.text)
            case ThinkingBlock():
                turn.reasoning.append(block.thinking)
            case ToolUseBlock():
                called = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                turn.calls.append({"id": block.id, "type": "function", "function": called})


def _result(block: ToolResultBlock) -> str:
    text = _SEPARATOR.join(_texts(block.content))
    return _ERROR + text if block.is_error else text


def _texts(content: SystemPrompt | None) -> list[str]:
    if isinstance(content, list):
        return [block.text for block in content]
    return [] if content is None else [content]
