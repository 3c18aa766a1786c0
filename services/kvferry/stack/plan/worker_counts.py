"""Chooses the workers of a stack on one machine, if their numbers are not given. Pure."""

from collections.abc import Mapping

from kvferry.core.settings.engine import AUTO

FEW_CORES = 4
"""Largest number of CPU cores on which one worker of role both is the default.

Two workers divide the cores: one waits while the other has work. On two cores, one worker of role both streams 1.6
times as fast as a pair, with a third of its p99 time to first token in bursts (docs/performance.md).
"""
_PAIR = {"prefill": 1, "decode": 1, "both": 0}


def worker_counts(
    given: Mapping[str, int | str], cores: int, *, has_gpu: bool, has_handoff: bool
) -> tuple[Mapping[str, int], str]:
    """Return the number of workers by role, and the reason if there is no pair of a prefill and a decode worker.

    Args:
        given: numbers by role (`prefill`, `decode`, `both`); `auto` for those that are not given.
        cores: number of CPU cores that all workers share.
        has_gpu: whether the workers use a GPU.
        has_handoff: whether a setting of the hand-off between workers is given, such as the connector.
    """
    if all(count == AUTO for count in given.values()) and cores <= FEW_CORES and not (has_gpu or has_handoff):
        return {"prefill": 0, "decode": 0, "both": 1}, (
            f"one worker computes prompts and outputs, which is faster on {cores} CPU core{'s' * (cores > 1)}; "
            "--prefill 1 --decode 1 starts a pair that hands KV over"
        )
    return {role: count if isinstance(count, int) else _PAIR[role] for role, count in given.items()}, ""
