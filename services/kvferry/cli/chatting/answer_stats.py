"""How long an answer took and what it used, as text."""

from kvferry.cli.chatting.received_answer import ReceivedAnswer
from kvferry.cli.chatting.safe_text import shown
from kvferry.cli.timeline import timeline
from kvferry.core.inference.chunks import Usage


def stats_line(answer: ReceivedAnswer) -> str:
    """Return time to first token, rate and token counts in one line, as far as they are known."""
    parts: list[str] = []
    if answer.ttft_seconds is not None:
        parts.append(f"TTFT {1e3 * answer.ttft_seconds:.0f} ms")
    if answer.usage is not None:
        output, decoding = answer.usage.completion_tokens, answer.total_seconds - (answer.ttft_seconds or 0.0)
        if output > 1 and decoding > 0:
            parts.append(f"{(output - 1) / decoding:.1f} tokens/s")
        parts.append(f"{answer.usage.prompt_tokens} prompt tokens ({_cached(answer)} cached), {output} generated")
    parts.append(f"{answer.total_seconds:.2f} s")
    return ", ".join(parts)


def stats_report(answer: ReceivedAnswer) -> str:
    """Return the line and, if the server is a kvferry gateway, where the time went."""
    if answer.timing is None or answer.usage is None:
        return f"{stats_line(answer)}\nthe server did not say where the time went"
    usage = Usage(answer.usage.prompt_tokens, answer.usage.completion_tokens, _cached(answer))
    drawn = timeline(answer.timing, usage, answer.ttft_seconds or 0.0, answer.total_seconds)
    return f"{stats_line(answer)}\n{shown(drawn)}"


def _cached(answer: ReceivedAnswer) -> int:
    details = None if answer.usage is None else answer.usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens
