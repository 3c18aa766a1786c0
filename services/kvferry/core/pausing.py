"""Pauses of generation, and the versions of a model's weights, as values that workers and gateways share. Pure.

A pool has one state, which each worker keeps: the state with the highest revision is current. A gateway that starts
reads it from the workers, and sends it to workers that have an older one.
"""

from dataclasses import dataclass
from enum import StrEnum

MAX_BY_CHARS = 128
"""Maximum length of the name of who paused."""
MAX_VERSION_CHARS = 128
"""Maximum length of a weight version."""


class PauseMode(StrEnum):
    """What happens to the requests that run when generation is paused; new ones wait until it resumes."""

    ABORT = "abort"
    """They end with the tokens that they have and the finish reason `abort`."""
    WAIT = "wait"
    """They run until they are complete."""
    KEEP = "keep"
    """They stop between two steps and continue when generation resumes."""


@dataclass(frozen=True, slots=True)
class PauseState:
    """Whether a worker or a pool generates."""

    revision: int = 0
    """Number of the change that led to this state; a higher one is newer. 0: never paused."""
    mode: PauseMode | None = None
    """`None` while generation runs."""
    by: str = ""
    """Name of who made the change."""
    since: float = 0.0
    """Time of the change, seconds since the epoch."""

    def next(self, mode: PauseMode | None, by: str, now: float) -> "PauseState":
        """Return the state after a change.

        Args:
            mode: the new mode; `None` to resume.
            by: name of who makes the change.
            now: time of the change, seconds since the epoch.
        """
        # Milliseconds order the changes of two gateways that do not see each other's.
        return PauseState(max(self.revision + 1, int(1000 * now)), mode, by[:MAX_BY_CHARS], now)


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """The weights that an engine computes with."""

    name: str = ""
    """Version, for people and trainers."""
    number: int = 0
    """Number of updates of this engine before it; tells apart two weights with the same name."""


VersionRuns = tuple[tuple[str, int], ...]
"""The versions that made a sample's tokens: each version with the index of its first token."""


def with_version(runs: VersionRuns, version: str, first: int) -> VersionRuns:
    """Return the runs of a sample's versions after further tokens.

    Args:
        runs: the runs so far.
        version: version of the tokens; empty if it is not known.
        first: index of the first of them in the sample's output.
    """
    if not version or (runs and runs[-1][0] == version):
        return runs
    return (*runs, (version, first))
