"""Bodies that have either a prompt or a conversation; a conversation is checked by the schema of chat requests."""

from collections.abc import Mapping
from typing import Any

from kvferry.core.errors import InvalidRequest
from kvferry.gateway.http.fields.strict import Strict, check_sizes, parse_fields
from kvferry.gateway.http.openai.schema import ChatRequest
from kvferry.serving import prompts
from kvferry.serving.text_model import TextModel

CHAT_FIELDS = ("tools", "chat_template_kwargs", "documents", "add_generation_prompt", "continue_final_message")
"""Fields of a conversation besides `messages`."""


def anything(value: Any) -> Any:
    """Accept any value, for fields that are checked later."""
    return value


def check_prompt_or_messages(body: Strict) -> None:
    """Check that a body has a prompt, or a conversation with its fields.

    Raises:
        InvalidRequest: it has both or neither, or a prompt with fields of a conversation.
    """
    fields: Mapping[str, Any] = dict(body)
    if (fields["prompt"] is None) == (fields["messages"] is None):
        given = "neither" if fields["prompt"] is None else "both"
        raise InvalidRequest(f"the request must have either prompt or messages, not {given}", field="prompt")
    for name in CHAT_FIELDS:
        if fields.get(name) is not None and fields["messages"] is None:
            raise InvalidRequest(
                f"{name} cannot be used with prompt; use messages instead of prompt, or omit it", field=name
            )


def chat_of(body: Strict, messages: object, *, is_strict: bool = False) -> ChatRequest:
    """Return a chat request with the fields of a body's conversation.

    Args:
        body: a body with the fields `CHAT_FIELDS`.
        messages: the body's messages, or others in their place.
        is_strict: whether unknown fields are refused.

    Raises:
        InvalidRequest: a field is invalid.
    """
    given: Mapping[str, Any] = {"messages": messages, **{name: dict(body).get(name) for name in CHAT_FIELDS}}
    fields = {name: value for name, value in given.items() if value is not None}
    check_sizes(fields)
    return parse_fields(ChatRequest, fields, is_strict=is_strict)


def encoded(model: TextModel, chat: ChatRequest) -> list[int]:
    """Tokenize a conversation.

    Raises:
        InvalidRequest: see `prompts.encode_chat`.
    """
    return prompts.encode_chat(
        model, chat.template_inputs(), chat.to_tool_use(), chat.template_variables(), chat.prompt_end()
    )
