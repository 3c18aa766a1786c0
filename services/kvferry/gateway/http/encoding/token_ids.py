"""Token ids of text and conversations, and the text of token ids, in vLLM's format."""

from typing import Annotated, Any, ClassVar

from msgspec import Struct
from pydantic import PlainValidator

from kvferry.core.errors import InvalidRequest
from kvferry.gateway.http.encoding.bodies import Answered, Body, Ids, is_ids, parse
from kvferry.gateway.http.encoding.conversations import anything, chat_of, check_prompt_or_messages, encoded
from kvferry.gateway.http.fields import field_policy
from kvferry.gateway.http.fields.field_policy import Rules
from kvferry.gateway.http.fields.request_fields import Message
from kvferry.gateway.http.fields.strict import shown
from kvferry.gateway.http.fields.tool_fields import ChatTool
from kvferry.gateway.http.openai.reply import encode
from kvferry.serving import prompts
from kvferry.serving.request import Caller
from kvferry.serving.text_model import TextModel
from kvferry.serving.text_service import TextService


def _check_ids(value: object) -> Ids:
    if not isinstance(value, list) or not is_ids(value):
        raise InvalidRequest(f"tokens must be a list of token ids, not {shown(value)}", field="tokens")
    return value


class TokenIds(Struct):
    """Response of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: Ids
    token_strs: list[str] | None
    """The text of each token, if it was requested."""


class TokenText(Struct):
    """Response of POST /detokenize."""

    prompt: str


class TokenizeBody(Body):
    """Body of POST /tokenize: text or a conversation."""

    RULES: ClassVar[Rules] = field_policy.TOKENIZE

    prompt: str | None = None
    messages: Annotated[Any, PlainValidator(anything, json_schema_input_type=list[Message] | None)] = None
    """Checked by the schema of chat requests."""
    tools: Annotated[Any, PlainValidator(anything, json_schema_input_type=list[ChatTool] | None)] = None
    """Checked by the schema of chat requests."""
    chat_template_kwargs: Annotated[Any, PlainValidator(anything, json_schema_input_type=dict[str, Any] | None)] = None
    """Checked by the schema of chat requests."""
    documents: Annotated[Any, PlainValidator(anything, json_schema_input_type=list[dict[str, Any]] | None)] = None
    """Checked by the schema of chat requests."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    """Whether the beginning-of-sequence token is added to text, true by default; a conversation has its template's
    special tokens."""
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """Body of POST /detokenize."""

    tokens: Annotated[Ids, PlainValidator(_check_ids, json_schema_input_type=Ids)]


def read_tokenize(model: TextModel, body: bytes, *, is_strict: bool = False) -> tuple[list[int], bool, tuple[str, ...]]:
    """Parse a body and tokenize its text or conversation; return the ids, whether each token's text is requested, and
    the names of the fields without effect.

    Args:
        model: the served model.
        body: JSON body of the request.
        is_strict: whether unknown fields are refused.

    Raises:
        InvalidRequest, UnknownModel: the request is invalid or cannot be served by this gateway.
    """
    request = parse(TokenizeBody, model, body, is_strict=is_strict)
    check_prompt_or_messages(request)
    if request.prompt is not None:
        prompts.check_num_chars(model, len(request.prompt))
        special = request.add_special_tokens is not False
        return model.tokenizer.encode(request.prompt, add_special=special), request.return_token_strs, request.ignored
    if request.add_special_tokens:
        raise InvalidRequest(
            "add_special_tokens has no effect on messages, whose template adds them; leave it out",
            field="add_special_tokens",
        )
    chat = chat_of(request, request.messages, is_strict=is_strict)
    return encoded(model, chat), request.return_token_strs, (*request.ignored, *chat.ignored)


def read_detokenize(model: TextModel, body: bytes, *, is_strict: bool) -> tuple[str, tuple[str, ...]]:
    """Parse a body; return the text of its token ids, and the names of the fields without effect.

    Args:
        model: the served model.
        body: JSON body of the request.
        is_strict: whether unknown fields are refused.

    Raises:
        InvalidRequest, UnknownModel: the request is invalid or cannot be served by this gateway.
    """
    request = parse(DetokenizeBody, model, body, is_strict=is_strict)
    prompts.check_num_tokens(model, len(request.tokens) - 1)  # a whole context may be detokenized
    prompts.check_token_ids(model, request.tokens, "tokens")
    return model.tokenizer.decode(request.tokens), request.ignored


async def answer_tokenize(service: TextService, caller: Caller, body: bytes, *, is_strict: bool) -> Answered:
    """Answer POST /tokenize.

    Raises:
        KvferryError: the request is invalid.
    """
    service.check_access(caller.tenant, service.model.name)
    ids, wants_texts, ignored = await service.read(caller.client, read_tokenize, len(body), body, is_strict=is_strict)
    service.count(caller.tenant)
    spell = service.model.tokenizer.token_bytes
    texts = [spell(token).decode("utf-8", "replace") for token in ids] if wants_texts else None
    return encode(TokenIds(len(ids), service.served_tokens, ids, texts)), ignored


async def answer_detokenize(service: TextService, caller: Caller, body: bytes, *, is_strict: bool) -> Answered:
    """Answer POST /detokenize.

    Raises:
        KvferryError: the request is invalid.
    """
    service.check_access(caller.tenant, service.model.name)
    text, ignored = await service.read(caller.client, read_detokenize, len(body), body, is_strict=is_strict)
    service.count(caller.tenant)
    return encode(TokenText(text)), ignored
