"""Bodies of the admin routes that pin prefixes, and the token ids of these prefixes."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from kvferry.core.errors import InvalidRequest
from kvferry.core.limits import MAX_CACHE_SALT_CHARS
from kvferry.gateway.http.encoding.bodies import Ids, is_ids
from kvferry.gateway.http.encoding.conversations import (
    CHAT_FIELDS,
    anything,
    chat_of,
    check_prompt_or_messages,
    encoded,
)
from kvferry.gateway.http.fields.strict import Strict, json_object, parse_fields, shown
from kvferry.serving import prompts
from kvferry.serving.text_model import TextModel

MAX_TENANT_CHARS = 256
_PROBES = ("a", "b")
"""Texts of two user messages. The common beginning of the prompts that end with them has only the tokens that precede
any user message."""


def _prompt(value: object) -> str | Ids | None:
    if value is None or isinstance(value, str) or (isinstance(value, list) and is_ids(value)):
        return value
    raise InvalidRequest(f"prompt must be a string or a list of token ids, not {shown(value)}", field="prompt")


class PrefixBody(Strict):
    """Body of POST /unpin_prefix."""

    prompt: Annotated[str | Ids | None, PlainValidator(_prompt)] = None
    messages: Annotated[Any, PlainValidator(anything)] = None
    """Checked by the schema of chat requests."""
    tools: Annotated[Any, PlainValidator(anything)] = None
    """Checked by the schema of chat requests."""
    chat_template_kwargs: Annotated[Any, PlainValidator(anything)] = None
    """Checked by the schema of chat requests."""
    model: str = ""
    """Name of the model or of an adapter; empty for the model."""
    tenant: Annotated[str, Field(max_length=MAX_TENANT_CHARS)] = ""
    """Tenant whose requests use the prefix; empty for the default tenant."""
    cache_salt: Annotated[str, Field(max_length=MAX_CACHE_SALT_CHARS)] | None = None
    """Salt of the requests that use the prefix."""


class PinBody(PrefixBody):
    """Body of POST /pin_prefix."""

    ttl_seconds: Annotated[float, Field(gt=0, le=7 * 24 * 3600)]


def read_prefix(model: TextModel, body: bytes, *, has_ttl: bool) -> tuple[list[int], PrefixBody]:
    """Parse a body and tokenize its prefix; return the token ids and the other fields, without the text.

    Args:
        model: the served model.
        body: a JSON object.
        has_ttl: whether the body is one of POST /pin_prefix, a `PinBody`.

    Raises:
        InvalidRequest: a field is invalid, unknown or missing, or the text cannot be tokenized.
    """
    made = parse_fields(PinBody if has_ttl else PrefixBody, json_object(body), is_strict=True)
    check_prompt_or_messages(made)
    ids = _conversation_ids(model, made) if made.prompt is None else _prompt_ids(model, made.prompt)
    prompts.check_num_tokens(model, len(ids))
    return ids, made.model_copy(update={"prompt": None, "messages": None, **dict.fromkeys(CHAT_FIELDS)})


def _prompt_ids(model: TextModel, prompt: str | Ids) -> list[int]:
    if isinstance(prompt, str):
        return prompts.encode_text(model, prompt)
    prompts.check_num_tokens(model, len(prompt))
    prompts.check_token_ids(model, prompt, "prompt")
    return prompt


def _conversation_ids(model: TextModel, body: PrefixBody) -> list[int]:
    """Tokenize a conversation as the beginning of requests: one that ends with a user's message or a tool's result is a
    request itself; any other one is continued by a user's message."""
    chat = chat_of(body, body.messages)
    if chat.template_inputs()[-1]["role"] in ("user", "tool"):
        return encoded(model, chat)
    probed = [chat_of(body, [*body.messages, {"role": "user", "content": probe}]) for probe in _PROBES]
    return _common([encoded(model, chat) for chat in probed])


def _common(lists: Sequence[list[int]]) -> list[int]:
    """Return the longest common beginning of two lists."""
    first, second = lists
    pairs = enumerate(zip(first, second, strict=False))
    common_length = next((i for i, (a, b) in pairs if a != b), min(map(len, lists)))
    return first[:common_length]
