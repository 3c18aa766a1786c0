"""Responses, their items and the events of their streams, as structs that msgspec encodes."""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from kvferry.core.inference.chunks import Timing, Usage
from kvferry.gateway.http.openai.reply import TokenLogprob

Status = Literal["in_progress", "completed", "incomplete", "failed"]
"""State of an item."""
ResponseStatus = Literal["queued", "cancelled"] | Status
"""State of a response; only a response in the background is queued or cancelled."""


class OutputTextPart(Struct, tag="output_text"):
    """Text of a message."""

    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: list[TokenLogprob] = []


class ReasoningPart(Struct, tag="reasoning_text"):
    """Text of the model's reasoning."""

    text: str


Part = OutputTextPart | ReasoningPart


class OutputMessage(Struct, tag="message"):
    """An assistant message."""

    id: str
    status: Status
    content: list[OutputTextPart]
    role: str = "assistant"


class OutputCall(Struct, tag="function_call"):
    """A call of a function."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


class OutputCustomCall(Struct, tag="custom_tool_call"):
    """A call of a custom tool."""

    id: str
    status: Status
    call_id: str
    name: str
    input: str


class OutputReasoning(Struct, tag="reasoning"):
    """The model's reasoning."""

    id: str
    status: Status
    content: list[ReasoningPart]
    summary: list[dict[str, Any]] = []
    encrypted_content: str | UnsetType = UNSET
    """Carrier of the text, if the request includes it."""


OutputItem = OutputMessage | OutputCall | OutputCustomCall | OutputReasoning


class InputDetails(Struct):
    cached_tokens: int
    """Number of tokens whose KV was in a prefix cache or loaded from a tier or another worker."""
    cache_write_tokens: int
    """Number of tokens whose KV was computed and put in a prefix cache (`ResponseUsage` in openai 3.54)."""


class ReasoningTokens(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> "ResponseUsage":
        """Return the token counts of an answer in this API's form."""
        return cls(
            usage.prompt_tokens,
            InputDetails(usage.cached_tokens, usage.cache_write_tokens),
            usage.output_tokens,
            ReasoningTokens(usage.reasoning_tokens),
            usage.prompt_tokens + usage.output_tokens,
        )


class IncompleteDetails(Struct):
    reason: str


class ResponseFailure(Struct):
    """Reason why a response failed; `code` is one of OpenAI's."""

    code: str
    message: str


class Response(Struct):
    """A response, in all of its states."""

    id: str
    created_at: float
    model: str
    status: ResponseStatus
    output: Sequence[OutputItem]
    metadata: dict[str, str]
    parallel_tool_calls: bool
    store: bool
    tool_choice: Any
    tools: list[dict[str, Any]]
    text: dict[str, Any]
    instructions: str | None
    previous_response_id: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    user: str | None
    completed_at: float | None = None
    usage: ResponseUsage | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    object: str = "response"
    background: bool = False
    truncation: str = "disabled"
    kvferry: Timing | UnsetType = UNSET
    """Timing; set in a response that has ended."""


class OutputCompaction(Struct, tag="compaction"):
    """A summary of the conversation before it."""

    id: str
    encrypted_content: str
    """Carrier of the summary."""


class InputTextPart(Struct, tag="input_text"):
    """Text of a message of the user."""

    text: str


class UserMessage(Struct, tag="message"):
    """A message of the user, as an item of the input."""

    id: str
    content: list[InputTextPart]
    role: str = "user"
    status: str = "completed"


class CompactedResponse(Struct):
    """Response of POST /v1/responses/compact."""

    id: str
    created_at: int
    output: list[UserMessage | OutputCompaction]
    """The messages of the user, then the summary."""
    usage: ResponseUsage
    object: str = "response.compaction"


class InputTokens(Struct):
    """Response of POST /v1/responses/input_tokens."""

    input_tokens: int
    object: str = "response.input_tokens"


class Event(Struct, tag_field="type"):
    """An event of a stream."""

    sequence_number: int


class ResponseCreated(Event, tag="response.created"):
    response: Response


class ResponseQueued(Event, tag="response.queued"):
    response: Response


class ResponseInProgress(Event, tag="response.in_progress"):
    response: Response


class ResponseCompleted(Event, tag="response.completed"):
    response: Response


class ResponseIncomplete(Event, tag="response.incomplete"):
    response: Response


class ResponseFailed(Event, tag="response.failed"):
    response: Response


class ItemAdded(Event, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(Event, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class PartAdded(Event, tag="response.content_part.added"):
    item_id: str
    output_index: int
    content_index: int
    part: Part


class PartDone(Event, tag="response.content_part.done"):
    item_id: str
    output_index: int
    content_index: int
    part: Part


class TextDelta(Event, tag="response.output_text.delta"):
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(Event, tag="response.output_text.done"):
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(Event, tag="response.reasoning_text.delta"):
    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningDone(Event, tag="response.reasoning_text.done"):
    item_id: str
    output_index: int
    content_index: int
    text: str


class ArgumentsDelta(Event, tag="response.function_call_arguments.delta"):
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Event, tag="response.function_call_arguments.done"):
    item_id: str
    output_index: int
    name: str
    arguments: str


class CustomInputDelta(Event, tag="response.custom_tool_call_input.delta"):
    item_id: str
    output_index: int
    delta: str


class CustomInputDone(Event, tag="response.custom_tool_call_input.done"):
    item_id: str
    output_index: int
    input: str


AnyEvent = (
    ResponseCreated
    | ResponseQueued
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | CustomInputDelta
    | CustomInputDone
)


class DeletedResponse(Struct):
    """Response of DELETE /v1/responses/{response_id}."""

    id: str
    object: str = "response"
    deleted: bool = True


class ItemList(Struct):
    """Response of GET /v1/responses/{response_id}/input_items."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool = False
    object: str = "list"
