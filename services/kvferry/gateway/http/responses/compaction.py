"""Summaries of conversations: the model writes one, and a client continues from it instead of from all items.

    items of a conversation ──► messages of the user, then an item `compaction` that carries the summary

The prompt is the one of the conversation with a request for a summary at its end, so that its KV is found in the cache.
"""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from kvferry.core.errors import GenerationFailed, InvalidRequest
from kvferry.core.ids import new_request_id
from kvferry.core.inference.chunks import Usage
from kvferry.core.limits import MAX_CACHE_SALT_CHARS
from kvferry.gateway.http.fields import field_policy
from kvferry.gateway.http.fields.cache_fields import CacheHintFields
from kvferry.gateway.http.fields.field_policy import Rules
from kvferry.gateway.http.fields.request_fields import overflow_in
from kvferry.gateway.http.fields.strict import Priority, check_sizes, json_object, parse_fields
from kvferry.gateway.http.openai.generation import Generation, ReadRequest, prepared
from kvferry.gateway.http.openai.schema import ReasoningOptions
from kvferry.gateway.http.responses.body import ResponseRequest, read_items
from kvferry.gateway.http.responses.carrier import Carried, CarrierKey
from kvferry.gateway.http.responses.items import InputMessage, Item, check_kinds
from kvferry.gateway.http.responses.output import (
    CompactedResponse,
    InputTextPart,
    OutputCompaction,
    ResponseUsage,
    UserMessage,
)
from kvferry.gateway.http.responses.tools import OfferedTool, take_other_tools, without_function
from kvferry.serving.request import Caller
from kvferry.serving.text_model import TextModel
from kvferry.serving.text_service import TextService

MAX_SUMMARY_TOKENS = 4096
"""Maximum number of tokens of a summary, unless the request sets another; at most a quarter of the context."""
_ASK = """Summarize the conversation above for an assistant that continues it and will not see it.
Keep what it needs: the user's goals and instructions, decisions and their reasons, facts, names and numbers, results of
tools, what is done, and what is left to do. Answer with the summary alone, as plain text."""


class CompactRequest(CacheHintFields):
    """Body of POST /v1/responses/compact."""

    RULES: ClassVar[Rules] = field_policy.COMPACT

    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[OfferedTool], Field(fail_fast=True)] | None = None
    """The conversation's tools, which are part of its prompt; the summary calls none."""
    reasoning: ReasoningOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_CACHE_SALT_CHARS)] | None = None
    priority: Priority = 0


@dataclass(frozen=True, slots=True)
class ReadCompaction:
    """A valid request."""

    chat: ReadRequest
    users: list[UserMessage]
    tools: Sequence[OfferedTool]
    ignored: tuple[str, ...]
    """Names of the request's fields without effect."""


def read_compaction(
    model: TextModel,
    body: bytes,
    before: Sequence[bytes],
    context_tokens: int,
    carrier_key: bytes,
    *,
    has_tools: bool = True,
    is_strict: bool = False,
) -> ReadCompaction:
    """Parse a body, render the template of its conversation and tokenize the prompt. The oldest turns of a conversation
    that is too long are left out.

    Args:
        model: the served model: tokenizer and chat template.
        body: body of the request, JSON.
        before: items of earlier responses, each a JSON array.
        context_tokens: number of tokens of prompt and output for which the workers have memory.
        carrier_key: key of the tenant's carriers.
        has_tools: whether the prompt has the conversation's tools.
        is_strict: whether unknown fields are refused.

    Raises:
        InvalidRequest, UnknownModel: the request is invalid or cannot be served by this gateway.
    """
    fields = json_object(body)
    check_sizes({name: value for name, value in fields.items() if name != "input"})
    if isinstance(fields.get("input"), list):
        check_kinds("input", fields["input"])
    others = take_other_tools(fields)
    given = parse_fields(CompactRequest, fields, is_strict=is_strict, also_ignored=others)
    if given.input is None and given.previous_response_id is None:
        raise InvalidRequest("input is missing; send the conversation's items, or previous_response_id", field="input")
    shared = {name: fields[name] for name in CompactRequest.model_fields if fields.get(name) is not None}
    limit = min(given.max_output_tokens or MAX_SUMMARY_TOKENS, max(1, context_tokens // 4))
    if not has_tools:
        shared.pop("tools", None)
    request = parse_fields(
        ResponseRequest, {"input": "", **shared, "max_output_tokens": limit, "truncation": "auto"}, is_strict=False
    )
    own = [] if given.input is None else request.items()
    closing = [{"role": "user", "content": _ASK}]
    chat, items, is_lost = read_items(model, request, own, before, context_tokens, CarrierKey(carrier_key), closing)
    users = [item for item in items if isinstance(item, InputMessage) and item.role == "user"]
    lost = ("input.encrypted_content",) if is_lost else ()
    return ReadCompaction(chat, [_shown(item) for item in users], request.tools or (), (*given.ignored, *lost))


def _shown(message: InputMessage) -> UserMessage:
    parts = [message.content] if isinstance(message.content, str) else [part.text for part in message.content]
    return UserMessage(message.id or f"msg_{new_request_id()}", [InputTextPart(part) for part in parts])


async def compact(
    service: TextService,
    caller: Caller,
    body: bytes,
    before: Sequence[bytes],
    key: CarrierKey,
    *,
    is_strict: bool = False,
) -> tuple[CompactedResponse, tuple[str, ...]]:
    """Let the model summarize a conversation; return the answer, and the names of the request's fields without effect.

    Args:
        service: the served model, and its limits.
        caller: request id, tenant and arrival time.
        body: body of the request, JSON.
        before: items of the conversation that it continues, each a JSON array.
        key: key of the tenant's carriers.
        is_strict: whether unknown fields are refused.

    Raises:
        GenerationFailed: the model wrote no text.
        KvferryError: the request is invalid, or the generation failed.
    """
    size = len(body) + sum(map(len, before))
    # The prompt has the conversation's tools, so that its KV is in the cache. If the model calls one instead of
    # writing, it is asked again without them.
    for has_tools in (True, False):
        with overflow_in("input"):
            read = await service.read(
                caller.client,
                read_compaction,
                size,
                body,
                before,
                service.served_tokens,
                key.key,
                has_tools=has_tools,
                is_strict=is_strict,
            )
            try:
                generation = await prepared(service, caller, read.chat, is_chat=True)
            except InvalidRequest as error:
                raise without_function(error, read.tools) from None
        summary, usage = await _summary(generation)
        if summary:
            name = f"cmp_{new_request_id()}"
            item = OutputCompaction(name, key.seal(summary, Carried.SUMMARY))
            output: list[UserMessage | OutputCompaction] = [*read.users, item]
            answer = CompactedResponse(f"resp_{new_request_id()}", generation.created, output, ResponseUsage.of(usage))
            return answer, read.ignored
    raise GenerationFailed(
        "the model wrote no summary; raise max_output_tokens, lower reasoning.effort, or send fewer items"
    )


async def _summary(generation: Generation) -> tuple[str, Usage]:
    """Generate; return the text without white space at its ends, and the token counts."""
    parts: list[str] = []
    usage: Usage | None = None
    async with aclosing(generation.chunks()) as chunks:
        async for chunk in chunks:
            parts.append(chunk.text)
            usage = chunk.usage or usage
    assert usage is not None, "the last chunk has the usage"
    return "".join(parts).strip(), usage
