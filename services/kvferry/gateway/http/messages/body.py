"""The bodies of the Messages API, and their conversion to a chat's prompt and parameters.

`fields.field_policy` has Anthropic's other fields. Tools of other types are left out of the prompt, and handled like
fields without effect.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Discriminator, Field, Tag, WithJsonSchema

from kvferry.core.errors import InvalidRequest, shortened
from kvferry.core.inference.tools import ToolUse
from kvferry.core.limits import MAX_CACHE_SALT_CHARS
from kvferry.core.retention import CacheHints
from kvferry.core.sampling import MAX_OUTPUT_TOKENS, RANGES, Range
from kvferry.gateway.http.fields import field_policy
from kvferry.gateway.http.fields.cache_fields import CacheControl, CacheHintFields
from kvferry.gateway.http.fields.field_policy import Rules
from kvferry.gateway.http.fields.strict import (
    MAX_IGNORED,
    Priority,
    SamplingFields,
    Strict,
    check_sizes,
    json_object,
    parse_fields,
)
from kvferry.gateway.http.fields.tool_fields import (
    FunctionDefinition,
    FunctionName,
    NamedChoice,
    ToolDefinition,
    tool_use,
)
from kvferry.gateway.http.messages.blocks import (
    ConversationMessage,
    SystemPrompt,
    block_marks,
    check_blocks,
    conversation,
)
from kvferry.gateway.http.openai.generation import ReadRequest, read_conversation
from kvferry.gateway.http.openai.schema import ChatRequest, renamed
from kvferry.serving import prompts
from kvferry.serving.text_model import TextModel
from kvferry.text.tools.grammars import textual_marks

_CLIENT = (None, "custom")
"""Types of tools that the client runs, with a schema of its own."""
_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
"""The choices of chat requests by those of Anthropic's."""


class ClientTool(Strict):
    """A tool that the model may call and the client runs."""

    RULES: ClassVar[Rules] = field_policy.CLIENT_TOOL

    type: Literal["custom", None] = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None


class OtherTool(Strict):
    """A tool that Anthropic defines or runs, such as `web_search_20250305`; never offered to the model."""

    type: Annotated[str, WithJsonSchema({"type": "string", "not": {"const": "custom"}})]
    name: str | None = None


AnyTool = Annotated[
    Annotated[ClientTool, Tag("<client>")] | Annotated[OtherTool, Tag("<other>")],
    Discriminator(lambda tool: "<client>" if _type_of(tool) in _CLIENT else "<other>"),
]


class ToolChoice(Strict):
    """Whether the model may, must not or must call tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """The tool to call, with the type `tool`."""
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """Whether the model reasons before it answers, if its chat template can switch that."""

    RULES: ClassVar[Rules] = field_policy.THINKING

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_OUTPUT_TOKENS)] | None = None
    """Maximum number of tokens of the reasoning; the answer then begins."""


class OutputFormat(Strict):
    """The format of the output's text."""

    type: Literal["json_schema"]
    body: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """Options of the output."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """How much the model reasons; `max` is `xhigh` of chat requests."""


class CountTokensRequest(Strict):
    """Body of POST /v1/messages/count_tokens: a conversation."""

    RULES: ClassVar[Rules] = field_policy.MESSAGES

    model: str | None = None
    messages: Annotated[list[ConversationMessage], Field(min_length=1, fail_fast=True)]
    system: SystemPrompt | None = None
    tools: Annotated[list[AnyTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Older name of `output_config.format`."""
    cache_control: CacheControl | None = None

    def cache_hints(self) -> CacheHints:
        """Return what the marks of the request, its blocks and its tools ask of the cache."""
        tools = [tool.cache_control for tool in self.tools or () if isinstance(tool, ClientTool)]
        return CacheHintFields().cache_hints([self.cache_control, *tools, *block_marks(self.system, self.messages)])

    def to_tool_use(self) -> ToolUse:
        """Convert the tools and the choice of a tool.

        Raises:
            InvalidRequest: the tools exceed a limit or contradict the choice, or the choice forces a tool that is not
                offered.
        """
        offered = [
            ToolDefinition(
                type="function",
                function=FunctionDefinition(
                    name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
                ),
            )
            for tool in self.tools or ()
            if isinstance(tool, ClientTool)
        ]
        given = self.tool_choice or ToolChoice(type="auto")
        choice: str | NamedChoice
        if given.type == "tool":
            if given.name is None:
                raise InvalidRequest("tool_choice.name is missing", field="tool_choice.name")
            choice = NamedChoice(type="function", function=FunctionName(name=given.name))
        else:
            choice = _CHOICES[given.type]
        for number, tool in enumerate(self.tools or ()):
            is_forced = given.type == "any" or (given.type == "tool" and tool.name == given.name)
            if isinstance(tool, OtherTool) and is_forced:
                raise InvalidRequest(
                    f"tool_choice may force the call of tools.{number}, whose type {shortened(tool.type)!r} is not "
                    "supported; leave the tool out, or use tool_choice auto",
                    field=f"tools.{number}.type",
                )
        return tool_use(offered, choice, not given.disable_parallel_tool_use)

    def prompt_fields(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the fields of a chat request with the same prompt, but without tools. The answer continues a last
        message of the assistant that has text.

        Args:
            messages: the messages for the chat template.
        """
        last = messages[-1]
        is_open = last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
        effort = None if self.output_config is None else self.output_config.effort
        variables = None if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}
        return {
            "messages": messages,
            "continue_final_message": is_open or None,
            "reasoning_effort": "xhigh" if effort == "max" else effort,
            "chat_template_kwargs": variables,
        }

    def without_effect(self) -> tuple[str, ...]:
        """Return the names of the fields and of the types of tools that have no effect, each once."""
        others = (f"tools.{tool.type}" for tool in self.tools or () if isinstance(tool, OtherTool))
        return tuple(dict.fromkeys((*self.ignored, *others)))[:MAX_IGNORED]


class MessageRequest(SamplingFields, CountTokensRequest):
    """Body of POST /v1/messages."""

    LIMITS: ClassVar[Mapping[str, Range]] = {
        **RANGES,
        "max_tokens": replace(RANGES["max_tokens"], low=0, is_optional=False),
        "temperature": replace(RANGES["temperature"], high=1.0),
    }

    max_tokens: int
    """Maximum number of output tokens; 0 computes and caches the prompt alone."""
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    """No effect."""
    # Extensions, as in chat requests.
    seed: int | None = None
    min_p: float | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_CACHE_SALT_CHARS)] | None = None
    priority: Priority = 0

    def as_chat(self, messages: list[dict[str, Any]], *, has_budget: bool = True) -> ChatRequest:
        """Return the chat request with the same prompt and parameters, but without tools.

        Args:
            messages: the messages for the chat template.
            has_budget: whether the length of the reasoning is limited.

        Raises:
            InvalidRequest: a parameter is out of range, or the messages are not a valid conversation.
        """
        for name in ("max_tokens", "temperature"):
            if (value := getattr(self, name)) is not None:
                self.LIMITS[name].check(name, value)
        config = self.output_config or OutputConfig()
        wanted = config.format or self.output_format
        if config.format and self.output_format and config.format != self.output_format:
            raise InvalidRequest(
                "output_format and output_config.format differ; leave out output_format, the older name",
                field="output_format",
            )
        format_ = None if wanted is None else {"name": "output", "schema": wanted.body}
        names = ("model", "temperature", "top_p", "top_k", "stream", "seed", "min_p", "ignore_eos", "cache_salt")
        return parse_fields(
            ChatRequest,
            {
                **{name: getattr(self, name) for name in names},
                **self.prompt_fields(messages),
                "thinking_token_budget": self.thinking.budget_tokens if self.thinking and has_budget else None,
                "max_tokens": max(1, self.max_tokens),
                "stop": self.stop_sequences,
                "priority": self.priority,
                "response_format": None if format_ is None else {"type": "json_schema", "json_schema": format_},
            },
        )


def _type_of(tool: object) -> object:
    return tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)


_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
_PLACE = re.compile(r"messages\.(\d+)(\.tool_call_id)?")
_TOOL = re.compile(r"tools\.(\d+)\.function(\.parameters)?")
_FORMAT = "output_config.format"


@dataclass(frozen=True, slots=True)
class BodyNames:
    """The names that the parts of a chat request have in the body that it was made from."""

    messages: tuple[str, ...]
    """Path of each message."""
    tools: tuple[int, ...]
    """Position of each tool."""

    def of(self, error: InvalidRequest) -> InvalidRequest:
        """Return an error about a chat request with the names of the body's fields."""
        error = renamed(error, _NAMES)
        if error.field is None or not error.field.startswith(("messages", "tools")):
            return error
        message = self._named(error.message).replace("a tool message", "a tool_result block")
        message = message.replace("tool messages", "tool_result blocks")
        return type(error)(message, field=self._named(error.field), reason=error.reason)

    def _named(self, text: str) -> str:
        return _TOOL.sub(self._tool, _PLACE.sub(self._message, text))

    def _message(self, found: re.Match[str]) -> str:
        number = int(found[1])
        place = self.messages[number] if number < len(self.messages) else "the end of messages"
        return place + (".tool_use_id" if found[2] else "")

    def _tool(self, found: re.Match[str]) -> str:
        return f"tools.{self.tools[int(found[1])]}" + (".input_schema" if found[2] else "")


@dataclass(frozen=True, slots=True)
class ReadMessage:
    """A valid request: the generation's parameters, and what the response needs of the body."""

    chat: ReadRequest
    max_tokens: int
    """Maximum number of output tokens that the client asked for."""
    ignored: tuple[str, ...]
    """Names of the fields without effect."""
    names: BodyNames


@dataclass(frozen=True, slots=True)
class ReadCount:
    """The number of tokens of a conversation."""

    model: str
    """The requested model or adapter; empty for the model."""
    num_tokens: int
    ignored: tuple[str, ...]
    """Names of the fields without effect."""


def read_message(model: TextModel, body: bytes, *, is_strict: bool = False) -> ReadMessage:
    """Parse the body of a message request, render the template of its conversation and tokenize the prompt.

    Args:
        model: the served model: tokenizer and chat template.
        body: body of the request, JSON.
        is_strict: whether unknown fields are refused.

    Raises:
        InvalidRequest, UnknownModel: the request is invalid or cannot be served by this gateway.
    """
    request = _parsed(MessageRequest, body, is_strict=is_strict)
    messages, names = _converted(request)
    # Agents send a budget to every model, so that it is no reason to refuse the request.
    has_budget = not textual_marks(model.answer_form.call_format, model.answer_form.marks)
    is_ignored = not has_budget and request.thinking is not None and request.thinking.budget_tokens is not None
    try:
        chat = request.as_chat(messages, has_budget=has_budget)
        has_format = chat.response_format is not None
        read = read_conversation(model, chat, request.to_tool_use(), _FORMAT if has_format else "tools")
    except InvalidRequest as error:
        raise names.of(error) from None
    read = replace(read, is_echo_alone=request.max_tokens == 0, hints=request.cache_hints())
    ignored = (*request.without_effect(), *(("thinking.budget_tokens",) if is_ignored else ()))
    return ReadMessage(read, request.max_tokens, ignored, names)


def read_count(model: TextModel, body: bytes, *, is_strict: bool = False) -> ReadCount:
    """Parse the body of a count request, and tokenize its conversation.

    Args:
        model: the served model: tokenizer and chat template.
        body: body of the request, JSON.
        is_strict: whether unknown fields are refused.

    Raises:
        InvalidRequest: the request is invalid.
    """
    request = _parsed(CountTokensRequest, body, is_strict=is_strict)
    messages, names = _converted(request)
    try:
        chat = parse_fields(ChatRequest, request.prompt_fields(messages))
        variables, end = chat.template_variables(), chat.prompt_end()
        ids = prompts.encode_chat(model, chat.template_inputs(), request.to_tool_use(), variables, end)
    except InvalidRequest as error:
        raise names.of(error) from None
    return ReadCount(request.model or "", len(ids), request.without_effect())


R = TypeVar("R", MessageRequest, CountTokensRequest)


def _parsed(kind: type[R], body: bytes, *, is_strict: bool) -> R:
    fields = json_object(body)
    check_sizes(fields)
    check_blocks(fields)
    if fields.get("thread") is not None:  # clients that get this reason send whole conversations
        raise InvalidRequest(
            "thread is not supported: no conversations are stored; send the whole conversation as messages",
            field="thread",
            reason="THREAD_UNSUPPORTED_REQUEST",
        )
    return parse_fields(kind, fields, is_strict=is_strict)


def _converted(request: CountTokensRequest) -> tuple[list[dict[str, Any]], BodyNames]:
    messages, places = conversation(request.system, request.messages)
    tools = [number for number, tool in enumerate(request.tools or ()) if isinstance(tool, ClientTool)]
    return messages, BodyNames(tuple(places), tuple(tools))
