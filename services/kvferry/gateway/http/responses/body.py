"""The body of a request of the Responses API, and its conversion to a chat's prompt and parameters.

`fields.field_policy` has OpenAI's other fields.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from kvferry.core.errors import CONTEXT_LENGTH_EXCEEDED, InvalidRequest, shortened
from kvferry.core.inference.tools import ToolUse
from kvferry.core.limits import MAX_CACHE_SALT_CHARS
from kvferry.core.sampling import RANGES, Range
from kvferry.gateway.http.fields import field_policy
from kvferry.gateway.http.fields.cache_fields import CacheHintFields
from kvferry.gateway.http.fields.field_policy import Rules
from kvferry.gateway.http.fields.request_fields import Metadata
from kvferry.gateway.http.fields.strict import (
    Priority,
    SamplingFields,
    Strict,
    check_sizes,
    json_object,
    parse_fields,
)
from kvferry.gateway.http.openai.generation import ReadRequest, read_conversation
from kvferry.gateway.http.openai.schema import ChatRequest, ReasoningOptions, renamed
from kvferry.gateway.http.responses.carrier import CarrierKey
from kvferry.gateway.http.responses.items import KINDS, Item, check_kinds, in_items, messages_of, with_carried
from kvferry.gateway.http.responses.tools import (
    OTHER_TOOL,
    CustomTool,
    FunctionChoices,
    OfferedTool,
    has_unenforced_format,
    take_other_tools,
    use_of,
)
from kvferry.serving.prompts import check_num_tokens
from kvferry.serving.text_model import TextModel

_LOGPROBS = "message.output_text.logprobs"
_CARRIER = "reasoning.encrypted_content"
R = TypeVar("R")
_ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[Item])


class TextFormat(Strict):
    """The format of the output's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    body: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None
    """No effect: the output always follows the schema."""


class TextOptions(Strict):
    """Options of the output's text."""

    RULES: ClassVar[Rules] = field_policy.RESPONSE_TEXT

    format: TextFormat | None = None


class EventOptions(Strict):
    """Options of a stream. Events have no padding."""

    RULES: ClassVar[Rules] = field_policy.STREAM_OPTIONS


class ResponseRequest(SamplingFields, CacheHintFields):
    """Body of POST /v1/responses."""

    RULES: ClassVar[Rules] = field_policy.RESPONSE
    LIMITS: ClassVar[Mapping[str, Range]] = {
        **RANGES,
        "max_output_tokens": RANGES["max_tokens"],
        "top_logprobs": RANGES["logprobs"],
    }

    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    tools: Annotated[list[OfferedTool], Field(fail_fast=True)] | None = None
    """Functions and custom tools; `parse_response` has taken out the other tools."""
    tool_choice: str | FunctionChoices | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: (
        Annotated[list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]], Field(fail_fast=True)]
        | None
    ) = None
    stream: bool | None = None
    stream_options: EventOptions | None = None
    user: str | None = None
    """Repeated in the response."""
    reasoning: ReasoningOptions | None = None
    background: bool | None = None
    """Whether the response is created after its request has been answered; it is stored then."""
    truncation: Literal["auto", "disabled"] | None = None
    """Whether the oldest items are left out of a conversation that is too long, instead of refusing it."""
    # Extensions, as in chat requests.
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_in_reasoning: bool | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_CACHE_SALT_CHARS)] | None = None
    priority: Priority = 0

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the JSON Schema, in which `tools` may have tools of other types, which are left out."""
        schema = super().__get_pydantic_json_schema__(core, handler)
        tools = handler.resolve_ref_schema(schema)["properties"]["tools"]
        (functions,) = (kind for kind in tools["anyOf"] if kind.get("type") == "array")
        functions["items"] = {"anyOf": [functions["items"], OTHER_TOOL]}
        return schema

    @property
    def is_stored(self) -> bool:
        """Whether the response is kept after it has ended."""
        return self.store is not False

    @property
    def has_carriers(self) -> bool:
        """Whether items of reasoning have carriers, `encrypted_content`."""
        return _CARRIER in (self.include or ())

    @property
    def custom_names(self) -> frozenset[str]:
        """Names of the custom tools."""
        return frozenset(tool.name for tool in self.tools or () if isinstance(tool, CustomTool))

    def items(self) -> list[Any]:
        """Return the items of the input; a string is a user message."""
        if isinstance(self.input, list):
            return self.input
        return [KINDS["message"].model_validate({"role": "user", "content": self.input})]

    def to_tool_use(self) -> ToolUse:
        """Convert the tools and the choice of a tool.

        Raises:
            InvalidRequest: the tools exceed a limit, or contradict the choice.
        """
        return use_of(self.tools or (), self.tool_choice, self.parallel_tool_calls)

    def as_chat(self, messages: Sequence[Any]) -> ChatRequest:
        """Return the chat request with the same prompt and parameters, but without tools.

        Raises:
            InvalidRequest: the items are not a valid conversation, or the text format is incomplete.
        """
        wants_logprobs = _LOGPROBS in (self.include or ())
        RANGES["logprobs"].check("top_logprobs", self.top_logprobs)
        shared = {
            name: getattr(self, name)
            for name in (
                "model",
                "temperature",
                "top_p",
                "stream",
                "seed",
                "top_k",
                "min_p",
                "stop",
                "ignore_eos",
                "stop_in_reasoning",
            )
        }
        return parse_fields(
            ChatRequest,
            {
                **shared,
                "messages": messages,
                "max_tokens": self.max_output_tokens,
                "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
                "thinking_token_budget": None if self.reasoning is None else self.reasoning.max_tokens,
                "cache_salt": self.cache_salt,
                "priority": self.priority,
                **self.model_dump(include=set(CacheHintFields.model_fields)),
                "logprobs": wants_logprobs,
                "top_logprobs": self.top_logprobs if wants_logprobs else None,
                "response_format": _response_format(self.text),
            },
        )


@dataclass(frozen=True, slots=True)
class ReadResponse:
    """A valid request: the generation's parameters, and the fields that the response repeats."""

    chat: ReadRequest
    body: ResponseRequest
    items: list[dict[str, Any]]
    """The items of the input, as JSON."""
    ignored: tuple[str, ...] = ()
    """Names of the request's fields without effect."""


def read_response(
    model: TextModel,
    body: bytes,
    history: Sequence[bytes],
    context_tokens: int | None,
    carrier_key: bytes,
    *,
    is_strict: bool = False,
) -> ReadResponse:
    """Parse the body of a Responses API request, render the template of its conversation and tokenize the prompt.

    Args:
        model: the served model: tokenizer and chat template.
        body: body of the request, JSON.
        history: items of earlier responses, each a JSON array.
        context_tokens: number of tokens of prompt and output for which the workers have memory; `None` to read a
            conversation of any length.
        carrier_key: key of the tenant's carriers of reasoning.
        is_strict: whether unknown fields are refused.

    Raises:
        InvalidRequest, UnknownModel: the request is invalid or cannot be served by this gateway.
    """
    request = parse_response(body, is_strict=is_strict)
    own = request.items()
    chat, _, is_lost = read_items(model, request, own, history, context_tokens, CarrierKey(carrier_key))
    shown = [item.model_dump(mode="json", by_alias=True, exclude_none=True) for item in own]
    ignored = [*request.ignored, *request.actions_without_effect()]
    if request.top_logprobs is not None and _LOGPROBS not in (request.include or ()):
        ignored.append("top_logprobs")
    ignored += ["input.encrypted_content"] if is_lost else []
    ignored += ["tools.format"] if has_unenforced_format(request.tools or (), request.tool_choice) else []
    return ReadResponse(chat, request, shown, tuple(ignored))


def read_items(
    model: TextModel,
    request: ResponseRequest,
    own: Sequence[Any],
    history: Sequence[bytes],
    context_tokens: int | None,
    key: CarrierKey,
    closing: Sequence[Mapping[str, Any]] = (),
) -> tuple[ReadRequest, list[Any], bool]:
    """Render the template of a conversation and tokenize the prompt; return it, all items of the conversation, and
    whether a carrier of reasoning could not be opened.

    Args:
        model: the served model: tokenizer and chat template.
        request: the parameters.
        own: items of the request.
        history: items of earlier responses, each a JSON array.
        context_tokens: number of tokens of prompt and output for which the workers have memory; `None` to read a
            conversation of any length.
        key: key of the tenant's carriers.
        closing: messages after those of the items, which no truncation leaves out.

    Raises:
        InvalidRequest, UnknownModel: the request is invalid or cannot be served by this gateway.
    """
    before = [item for part in history for item in _ITEMS.validate_json(part)]
    paths = ["previous_response_id"] * len(before)
    paths += (
        [f"input.{number}" for number in range(len(own))] if isinstance(request.input, list) else ["input"] * len(own)
    )
    items, is_lost = with_carried([*before, *own], paths, key)
    messages, places = messages_of(items, paths)
    instructions = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    use = request.to_tool_use()

    def read(first: int) -> ReadRequest:
        """Read the conversation from message `first` on."""
        try:
            chat = read_conversation(
                model,
                request.as_chat([*instructions, *messages[first:], *closing]),
                use,
                constraint_field="text.format",
            )
            if context_tokens is not None:
                check_num_tokens(model, len(chat.prompts[0]) + _reserve(request, context_tokens), context_tokens)
        except InvalidRequest as error:
            paths = [*(["instructions"] if instructions else []), *places[first:]]
            raise renamed(in_items(error, paths), _NAMES) from None
        return chat

    starts = _starts(messages) if request.truncation == "auto" and context_tokens is not None else []
    return first_fitting([0, *starts], read), items, is_lost


def first_fitting(starts: Sequence[int], read: Callable[[int], R]) -> R:
    """Return what `read` returns for the first start whose conversation fits in the context.

    Args:
        starts: in ascending order; a later one gives a shorter conversation.
        read: reads the conversation from a start on.

    Raises:
        InvalidRequest: no conversation fits, or one is invalid.
    """

    def attempt(place: int) -> R | InvalidRequest:
        try:
            return read(starts[place])
        except InvalidRequest as error:
            if error.reason != CONTEXT_LENGTH_EXCEEDED:
                raise
            return error

    first = attempt(0)
    if not isinstance(first, InvalidRequest):
        return first
    found: R | None = None
    low, high = 1, len(starts) - 1
    while low <= high:
        middle = (low + high) // 2
        made = attempt(middle)
        if isinstance(made, InvalidRequest):
            low = middle + 1
        else:
            found, high = made, middle - 1
    if found is None:
        raise first
    return found


def _starts(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the places where a shortened conversation may begin: the user's messages, as templates expect."""
    return [number for number, message in enumerate(messages) if number and message["role"] == "user"]


def _reserve(request: ResponseRequest, context_tokens: int) -> int:
    """Return the number of tokens that a shortened prompt leaves free for the output, besides one."""
    if request.truncation != "auto" or request.max_output_tokens is None:
        return 0
    return max(0, min(request.max_output_tokens, context_tokens // 2) - 1)


def parse_response(body: bytes, *, is_strict: bool = False) -> ResponseRequest:
    """Parse and validate a body.

    Args:
        body: a JSON object.
        is_strict: whether unknown fields are refused.

    Raises:
        InvalidRequest: a field is invalid or refused; the error describes the first such field.
    """
    fields = json_object(body)
    check_sizes({name: value for name, value in fields.items() if name != "input"})
    if isinstance(fields.get("input"), list):
        check_kinds("input", fields["input"])
    others = take_other_tools(fields)
    include = fields.get("include")
    for name in include if isinstance(include, list) else ():
        if isinstance(name, str) and name not in (_LOGPROBS, _CARRIER):
            raise InvalidRequest(
                f"include {shortened(name)!r} is not supported; use {_LOGPROBS} or {_CARRIER}", field="include"
            )
    request = parse_fields(ResponseRequest, fields, is_strict=is_strict, also_ignored=others)
    for number, tool in enumerate(request.tools or ()):
        if isinstance(tool, CustomTool):
            tool.check(f"tools.{number}")
    return request


def _response_format(options: TextOptions | None) -> dict[str, Any] | None:
    given = None if options is None else options.format
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"type": "json_object"}
    if given.name is None or given.body is None:
        missing = "name" if given.name is None else "schema"
        raise InvalidRequest(f"text.format.{missing} is missing", field=f"text.format.{missing}")
    return {"type": "json_schema", "json_schema": {"name": given.name, "schema": given.body}}


_NAMES = {
    "reasoning_effort": "reasoning.effort",
    "thinking_token_budget": "reasoning.max_tokens",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format": "text.format",
}
