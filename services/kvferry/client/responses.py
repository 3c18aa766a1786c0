"""Converts the responses of a gateway to the values that both clients return."""

from array import array
from dataclasses import dataclass, fields

from kvferry.core.inference.chunks import TextChunk, Timing, Usage
from kvferry.core.inference.tool_calls import CallDelta
from kvferry.rpc import retention_wire, wire
from kvferry.v1 import inference_pb2

_NESTED = frozenset({"kv", "retention", "weight_versions"})
"""Fields of `Timing` that are messages."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of one input."""

    values: "array[float]"
    """32-bit floats; `numpy.asarray` reads them without a copy."""
    num_prompt_tokens: int


def chunk_from_wire(message: inference_pb2.GenerateResponse) -> TextChunk:
    """Convert a response of `Inference.Generate` to a chunk; a sample's last chunk has usage and timing."""
    usage: Usage | None = None
    timing: Timing | None = None
    if message.HasField("usage"):
        given = message.usage
        usage = Usage(
            given.prompt_tokens,
            given.output_tokens,
            given.cached_tokens,
            given.unreturned_tokens,
            cache_write_tokens=given.cache_write_tokens,
            reasoning_tokens=given.reasoning_tokens,
        )
    if message.HasField("timing"):
        plain = {f.name: getattr(message.timing, f.name) for f in fields(Timing) if f.name not in _NESTED}
        retention = retention_wire.retention_from_wire(message.timing.retention)
        timing = Timing(
            **plain,
            kv=wire.kv_reports_from_wire(message.timing.kv),
            retention=retention,
            weight_versions=tuple((one.version, one.first_token) for one in message.timing.weight_versions),
        )
    stopped = message.WhichOneof("stop_reason")
    return TextChunk(
        index=message.index,
        text=message.text,
        tokens=wire.tokens_from_wire(message.tokens),
        finish_reason=wire.finish_from_wire(message.finish_reason),
        usage=usage,
        timing=timing,
        stop_reason=None if stopped is None else getattr(message, stopped),
        prompt_logprobs=wire.scores_from_wire(message.prompt_logprobs) or None,
        reasoning=message.reasoning,
        tool_calls=tuple(CallDelta(call.index, call.id, call.name, call.arguments) for call in message.tool_calls),
    )


def embeddings_from_wire(message: inference_pb2.EmbedResponse) -> list[Embedding]:
    """Convert a response of `Inference.Embed` to vectors, in the order of the inputs."""
    return [Embedding(array("f", item.values), item.prompt_tokens) for item in message.embeddings]
