"""Prompts of the offline API, which takes one or several."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvferry.core.errors import InvalidRequest, shortened
from kvferry.text.templates.chat_template import Message

Prompt = str | Sequence[int]
"""A string, or a list of token ids."""


def prompt_list(prompts: Prompt | Sequence[Prompt], field: str = "prompts") -> list[Prompt]:
    """Return prompts as a list: a string or a list of token ids is one prompt.

    Args:
        prompts: one prompt, or a list of prompts.
        field: name of the argument, for error messages.

    Raises:
        InvalidRequest: an item is neither a string nor a list of token ids.
    """
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts, field, "a string, a list of token ids, or a list of these")
    if items and all(type(one) is int for one in items):
        return [items]
    return [checked_prompt(one, f"{field}.{at}") for at, one in enumerate(items)]


def conversation_list(conversations: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    """Return conversations as a list: a list of messages is one conversation.

    Raises:
        InvalidRequest: an item is not a list of messages, or a message has no role.
    """
    items = _items(conversations, "conversations", "a list of messages, or a list of such lists")
    several = [items] if items and isinstance(items[0], Mapping) else items
    return [message_list(messages, f"conversations.{at}") for at, messages in enumerate(several)]


def message_list(messages: Sequence[Message], field: str = "messages") -> list[Message]:
    """Return the messages of one conversation as a list.

    Args:
        messages: the messages, oldest first.
        field: name of the argument, for error messages.

    Raises:
        InvalidRequest: the conversation is not a list of messages, or a message has no role.
    """
    items = _items(messages, field, "a list of messages")
    for at, message in enumerate(items):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest(
                f'{field}.{at} must be a message such as {{"role": "user", "content": "Hello"}}, '
                f"not {shortened(repr(message))}",
                field=_top(field),
            )
    return items


def checked_prompt(value: object, field: str = "prompt") -> Prompt:
    """Return one prompt, its token ids as a list.

    Args:
        value: the prompt of a caller.
        field: name of the argument, for error messages.

    Raises:
        InvalidRequest: the prompt is neither a string nor a list of token ids.
    """
    if isinstance(value, str):
        return value
    items = _items(value, field, "a string or a list of token ids")
    for one in items:
        if type(one) is not int:
            raise InvalidRequest(
                f"{field} contains {shortened(repr(one))}; token ids must be integers", field=_top(field)
            )
    return items


def _items(value: object, field: str, expected: str) -> list[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidRequest(f"{field} must be {expected}, not {shortened(repr(value))}", field=_top(field))
    return list(value)


def _top(field: str) -> str:
    return field.partition(".")[0]


def prompt_key(prompt: Prompt) -> str | tuple[int, ...]:
    """Return a key for a prompt, so that equal prompts are computed once."""
    return prompt if isinstance(prompt, str) else tuple(prompt)


def pairs(a: Prompt | Sequence[Prompt], b: Prompt | Sequence[Prompt]) -> list[tuple[Prompt, Prompt]]:
    """Return the pairs to compare: one with one, one with each of several, or the items of two equally long lists.

    Raises:
        InvalidRequest: the numbers of prompts do not match, or a list is empty.
    """
    left, right = prompt_list(a, "a"), prompt_list(b, "b")
    if len(left) == 1:
        left = left * len(right)
    if not right or len(left) != len(right):
        raise InvalidRequest(
            f"{len(left)} prompts in a cannot be compared with {len(right)} in b; pass one prompt in a, or as many as "
            "in b",
            field="prompts",
        )
    return list(zip(left, right, strict=True))
