"""Converts between text chunks and `Inference` messages."""

from dataclasses import fields

from kvferry.core.ids import RequestId
from kvferry.rpc import wire
from kvferry.rpc.text.text_stream import TextChunk, Usage
from kvferry.rpc.text.token_source import Timing
from kvferry.v1 import inference_pb2


def chunk_to_wire(request_id: RequestId, chunk: TextChunk) -> inference_pb2.GenerateResponse:
    """Convert a chunk to a response of `Inference.Generate`."""
    response = inference_pb2.GenerateResponse(
        request_id=request_id,
        index=chunk.index,
        text=chunk.text,
        tokens=[wire.token_to_wire(token) for token in chunk.tokens],
        finish_reason=wire.finish_to_wire(chunk.finish_reason),
        prompt_logprobs=wire.scores_to_wire(chunk.prompt_logprobs),
    )
    if isinstance(chunk.stop_reason, str):
        response.stop_string = chunk.stop_reason
    elif chunk.stop_reason is not None:
        response.stop_token_id = chunk.stop_reason
    if chunk.usage is not None and chunk.timing is not None:
        response.usage.prompt_tokens = chunk.usage.prompt_tokens
        response.usage.output_tokens = chunk.usage.output_tokens
        response.usage.cached_tokens = chunk.usage.cached_tokens
        response.timing.CopyFrom(_timing_to_wire(chunk.timing))
    return response


def chunk_from_wire(message: inference_pb2.GenerateResponse) -> TextChunk:
    """Convert a response of `Inference.Generate` to a chunk; a sample's last chunk has usage and timing."""
    usage: Usage | None = None
    timing: Timing | None = None
    if message.HasField("usage"):
        usage = Usage(message.usage.prompt_tokens, message.usage.output_tokens, message.usage.cached_tokens)
    if message.HasField("timing"):
        plain = {f.name: getattr(message.timing, f.name) for f in fields(Timing) if f.name != "kv"}
        timing = Timing(**plain, kv=wire.kv_reports_from_wire(message.timing.kv))
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
    )


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
        kv=wire.kv_reports_to_wire(timing.kv),
    )
