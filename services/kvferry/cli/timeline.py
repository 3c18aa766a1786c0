"""Draws the timing of a request as a text timeline."""

from kvferry.cli.amounts import counted, size_of
from kvferry.core.inference.chunks import Timing, Usage

_WIDTH = 40


def timeline(timing: Timing, usage: Usage | None, ttft_seconds: float, total_seconds: float) -> str:
    """Draw a timeline of a request: queue, prefill, first token, hand-off and decode on one scale.

    prefill        ███                                     61.2 ms  37 tokens, 0 cached, 127.0.0.1:9100
    ...
    """
    prompt = 0 if usage is None else usage.prompt_tokens
    output = 0 if usage is None else usage.output_tokens
    cached = 0 if usage is None else usage.cached_tokens
    prefill_at = timing.queue_seconds
    first_at = max(ttft_seconds, timing.first_token_seconds)
    decode_from = first_at + timing.handoff_seconds
    decode_seconds = max(0.0, total_seconds - decode_from)
    rate = (output - 1) / (total_seconds - first_at) if output > 1 and total_seconds > first_at else 0.0
    size = size_of(timing.handoff_bytes)
    moved = f"{timing.handoff_outcome}: {counted(timing.handoff_blocks, 'block')}, {size} over {timing.connector}"
    computed = _listed(counted(prompt, "token"), f"{cached} cached", timing.prefill_worker)
    decoded = _listed(counted(output, "token"), f"{rate:.1f} tokens/s", timing.decode_worker)
    rows = [
        ("queue", 0.0, timing.queue_seconds, ""),
        ("prefill", prefill_at, timing.prefill_seconds, computed),
        ("first token", first_at, 0.0, "streamed before the hand-off" if timing.handoff_outcome else ""),
        ("hand-off", first_at, timing.handoff_seconds, moved if timing.handoff_outcome else "none"),
        ("decode", decode_from, decode_seconds, decoded),
    ]
    return "\n".join(_row(name, start, span, note, total_seconds).rstrip() for name, start, span, note in rows)


def _listed(*parts: str) -> str:
    """Return the parts that are known; a worker that computes all of an answer has no prefill worker beside it."""
    return ", ".join(filter(None, parts))


def _row(name: str, start: float, span: float, note: str, total: float) -> str:
    scale = _WIDTH / total if total > 0 else 0.0
    left = min(_WIDTH - 1, int(start * scale))
    filled = max(1, min(_WIDTH - left, round(span * scale)))
    bar = " " * left + ("|" if span == 0 else "█") * filled
    shown = f"{1e3 * (span or start):9.1f} ms"
    return f"{name:<12} {bar:<{_WIDTH}} {shown}  {note}"
