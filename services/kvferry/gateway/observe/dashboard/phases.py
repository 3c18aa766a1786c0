"""Phases of an ended sample in order of time, for its waterfall."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a sample; times in seconds since the request's arrival."""

    name: str
    """`queue`, `prefill`, `first_token` (from the end of the computation to the first token at the gateway), `handoff`
    or `decode`."""
    start: float
    end: float


def phases(*, queue: float, prefill: float, first_token: float, handoff: float, total: float) -> list[Phase]:
    """Return the non-empty phases of a sample from its timing; each begins where the previous one ends.

    The durations come from different processes. A phase whose duration extends past the next known instant is cut
    there, so that the phases cover 0 to `total`.

    Args:
        queue, prefill, handoff: durations in seconds.
        first_token: seconds to the first token; 0 if there was none.
        total: seconds to the end of the sample.
    """
    # Without a first token, `first_token` covers the time from the last phase to the end.
    first = min(first_token, total) if first_token > 0 else total
    lengths = [("queue", queue, first), ("prefill", prefill, first), ("first_token", first, first)]
    if first_token > 0:
        lengths += [("handoff", handoff, total), ("decode", total, total)]
    found, at = [], 0.0
    for name, seconds, limit in lengths:
        end = min(at + max(0.0, seconds), limit)
        if end > at:
            found.append(Phase(name, at, end))
            at = end
    return found
