"""The line about a worker's throughput that is logged from time to time. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkDone:
    """What an engine has done until a moment, and what it has at that moment."""

    at: float
    """The moment, in seconds of a monotonic clock."""
    prompt_tokens: int
    """Prompt tokens of the requests that have started, cached ones included."""
    output_tokens: int
    queried_tokens: int
    """Prompt tokens that were looked up in the prefix cache."""
    hit_tokens: int
    """Tokens among them that were found."""
    running: int
    waiting: int
    """Sequences that wait for room or for KV."""
    kv_usage: float
    """Share of the KV pages in use, 0 to 1."""


def throughput_text(before: WorkDone, now: WorkDone) -> str | None:
    """Return the line about the time between two moments; `None` if nothing was done and nothing is to be done.

    Args:
        before: the engine at an earlier moment.
        now: the engine now.
    """
    seconds = now.at - before.at
    prompt, output = now.prompt_tokens - before.prompt_tokens, now.output_tokens - before.output_tokens
    if seconds <= 0 or not (prompt or output or now.running or now.waiting):
        return None
    queried = now.queried_tokens - before.queried_tokens
    hits = f"{100 * (now.hit_tokens - before.hit_tokens) / queried:.1f} %" if queried else "none queried"
    return (
        f"running {now.running}, waiting {now.waiting}; prompt {prompt / seconds:.1f} tokens/s, "
        f"output {output / seconds:.1f} tokens/s; KV {100 * now.kv_usage:.1f} % used, prefix cache hits {hits}"
    )
