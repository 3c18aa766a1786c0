"""Converts between text chunks, chats and `Inference` messages."""

from collections.abc import Mapping
from typing import Literal

from pydantic_core import from_json

from kvferry.core.errors import InvalidRequest
from kvferry.core.ids import RequestId
from kvferry.core.inference.beams import BeamParams
from kvferry.core.inference.chunks import TextChunk, Timing
from kvferry.core.inference.tools import MAX_PARAMETERS_CHARS, MAX_TOOLS, Tool, ToolMode, ToolUse
from kvferry.core.sampling import MAX_OUTPUT_TOKENS
from kvferry.rpc import retention_wire, wire
from kvferry.text.tools.conversations import MAX_CALLS, call_input
from kvferry.v1 import inference_pb2


def chunk_to_wire(request_id: RequestId, chunk: TextChunk) -> inference_pb2.GenerateResponse:
    """Convert a chunk to a response of `Inference.Generate`.

    Args:
        request_id: id of the request.
        chunk: a chunk of one sample.
    """
    response = inference_pb2.GenerateResponse(
        request_id=request_id,
        index=chunk.index,
        text=chunk.text,
        tokens=[wire.token_to_wire(token) for token in chunk.tokens],
        finish_reason=wire.finish_to_wire(chunk.finish_reason),
        prompt_logprobs=wire.scores_to_wire(chunk.prompt_logprobs),
        reasoning=chunk.reasoning,
        tool_calls=[
            inference_pb2.ToolCallDelta(index=call.index, id=call.call_id, name=call.name, arguments=call.arguments)
            for call in chunk.tool_calls
        ],
    )
    if isinstance(chunk.stop_reason, str):
        response.stop_string = chunk.stop_reason
    elif chunk.stop_reason is not None:
        response.stop_token_id = chunk.stop_reason
    if chunk.usage is not None and chunk.timing is not None:
        response.usage.prompt_tokens = chunk.usage.prompt_tokens
        response.usage.output_tokens = chunk.usage.output_tokens
        response.usage.cached_tokens = chunk.usage.cached_tokens
        response.usage.cache_write_tokens = chunk.usage.cache_write_tokens
        response.usage.reasoning_tokens = chunk.usage.reasoning_tokens
        response.usage.unreturned_tokens = chunk.usage.unreturned_tokens
        response.timing.CopyFrom(_timing_to_wire(chunk.timing))
    return response


_CHOICES: Mapping[int, ToolMode] = {
    inference_pb2.ToolChoice.MODE_AUTO: ToolMode.AUTO,
    inference_pb2.ToolChoice.MODE_NONE: ToolMode.NONE,
    inference_pb2.ToolChoice.MODE_REQUIRED: ToolMode.REQUIRED,
}


def messages_from_wire(chat: inference_pb2.Chat) -> list[dict[str, object]]:
    """Return a chat's messages in the form that chat templates expect.

    Raises:
        InvalidRequest: a field does not belong to its message's role, or is missing.
    """
    return [_message_from_wire(message, f"messages.{number}") for number, message in enumerate(chat.messages)]


def _message_from_wire(message: inference_pb2.ChatMessage, where: str) -> dict[str, object]:
    owners = {"tool_calls": "assistant", "reasoning": "assistant", "tool_call_id": "tool", "name": "tool"}
    for name, owner in owners.items():
        if getattr(message, name) and message.role != owner:
            raise InvalidRequest(
                f"{where}.{name} belongs to messages of role {owner}; leave it out", field=f"{where}.{name}"
            )
    if len(message.tool_calls) > MAX_CALLS:
        raise InvalidRequest(
            f"{where}.tool_calls has {len(message.tool_calls)} calls; at most {MAX_CALLS} are accepted",
            field=f"{where}.tool_calls",
        )
    found: dict[str, object] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        found["tool_calls"] = [call_input(call.id, call.name, call.arguments) for call in message.tool_calls]
    if message.role == "tool":
        found["tool_call_id"] = message.tool_call_id
    if message.name:
        found["name"] = message.name
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    return found


_EARLY_STOPPING: dict[int, bool | Literal["never"]] = {
    inference_pb2.BeamSearch.STOPPING_UNSPECIFIED: False,
    inference_pb2.BeamSearch.STOPPING_BEST: False,
    inference_pb2.BeamSearch.STOPPING_FIRST: True,
    inference_pb2.BeamSearch.STOPPING_NEVER: "never",
}


def beams_from_wire(request: inference_pb2.GenerateRequest, num_samples: int) -> BeamParams | None:
    """Return the parameters of a request's beam search; `None` if it samples.

    Raises:
        InvalidRequest: a field is out of range, or more outputs than beams are requested.
    """
    if not request.HasField("beams"):
        return None
    given = request.beams
    if given.stopping not in _EARLY_STOPPING:
        raise InvalidRequest(f"beams.stopping has the unknown value {given.stopping}", field="beams.stopping")
    try:
        params = BeamParams(
            given.width,
            max_tokens=request.sampling.max_tokens or MAX_OUTPUT_TOKENS,
            length_penalty=given.length_penalty if given.HasField("length_penalty") else 1.0,
            early_stopping=_EARLY_STOPPING[given.stopping],
            ignore_eos=request.sampling.ignore_eos,
        )
    except InvalidRequest as error:
        raise InvalidRequest(f"beams.{error.message}", field=f"beams.{error.field}") from None
    if num_samples > params.width:
        raise InvalidRequest(f"n must be at most beams.width ({params.width}), not {num_samples}", field="n")
    return params


def tool_use_from_wire(chat: inference_pb2.Chat) -> ToolUse:
    """Return the tools of a chat and how they may be used.

    Raises:
        InvalidRequest: see `ToolUse`; a schema is not JSON, or the mode is unknown.
    """
    if len(chat.tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(chat.tools)} items; at most {MAX_TOOLS} are accepted", field="tools")
    choice = _CHOICES.get(chat.tool_choice.mode)
    if choice is None:
        raise InvalidRequest(
            f"tool_choice.mode {chat.tool_choice.mode} is unknown; use MODE_AUTO, MODE_NONE or MODE_REQUIRED",
            field="tool_choice",
        )
    if chat.tool_choice.function and choice is not ToolMode.REQUIRED:
        raise InvalidRequest(
            "tool_choice.function needs MODE_REQUIRED; set the mode, or leave function out", field="tool_choice"
        )
    is_parallel = chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else True
    tools = tuple(
        Tool(tool.name, tool.description, _json_object(tool.parameters, f"tools.{number}.function.parameters"))
        for number, tool in enumerate(chat.tools)
    )
    allowed = frozenset(chat.tool_choice.allowed) or None
    if allowed is not None and chat.tool_choice.function:
        raise InvalidRequest(
            "tool_choice has both function and allowed; leave one of them out", field="tool_choice.allowed"
        )
    return ToolUse(tools, choice, chat.tool_choice.function, is_parallel=is_parallel, allowed=allowed)


def variables_from_wire(chat: inference_pb2.Chat) -> dict[str, object]:
    """Return the further variables of a chat's template.

    Raises:
        InvalidRequest: they are not the text of a JSON object, or the text is too long.
    """
    return _json_object(chat.chat_template_kwargs, "chat_template_kwargs")


def _json_object(text: str, where: str) -> dict[str, object]:
    if len(text) > MAX_PARAMETERS_CHARS:
        raise InvalidRequest(
            f"{where} has {len(text)} characters; at most {MAX_PARAMETERS_CHARS} are accepted", field=where
        )
    try:
        value = from_json(text, allow_inf_nan=False) if text else {}
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be the text of a JSON object", field=where)
    return value


def _timing_to_wire(timing: Timing) -> inference_pb2.Timing:
    return inference_pb2.Timing(
        queue_seconds=timing.queue_seconds,
        prefill_seconds=timing.prefill_seconds,
        first_token_seconds=timing.first_token_seconds,
        handoff_seconds=timing.handoff_seconds,
        connector=timing.connector,
        handoff_blocks=timing.handoff_blocks,
        handoff_bytes=timing.handoff_bytes,
        handoff_outcome=timing.handoff_outcome,
        total_seconds=timing.total_seconds,
        prefill_worker=timing.prefill_worker,
        decode_worker=timing.decode_worker,
        resumed=timing.resumed,
        weight_versions=[
            inference_pb2.WeightVersion(version=version, first_token=first) for version, first in timing.weight_versions
        ],
        kv=wire.kv_reports_to_wire(timing.kv),
        retention=None if timing.retention is None else retention_wire.retention_to_wire(timing.retention),
    )
