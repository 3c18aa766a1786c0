"""Delays before restarting an exited process: exponential backoff that resets after a long run; the line about it."""

import signal
from dataclasses import dataclass, replace

_CAUSES = {
    signal.SIGKILL: "the kernel ends processes when memory runs out",
    signal.SIGBUS: "a file of the model was truncated while it was in use, or its disk failed; replace models by new "
    "files, and do not write to files that are served",
}
"""What usually sends the signals that end a process."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Parameters of the restart backoff."""

    first_seconds: float = 0.2
    factor: float = 2.0
    max_seconds: float = 10.0
    calm_seconds: float = 30.0
    """Run time in seconds after which the backoff is reset."""


@dataclass(frozen=True, slots=True)
class RestartHistory:
    """Number of consecutive exits of a process without a run of at least `calm_seconds`."""

    deaths: int = 0

    def after_death(self, policy: RestartPolicy, ran_seconds: float) -> tuple["RestartHistory", float]:
        """Record an exit; return the updated history and the delay before the restart in seconds.

        Args:
            policy: delays between restarts.
            ran_seconds: time for which the process ran.
        """
        deaths = 1 if ran_seconds >= policy.calm_seconds else self.deaths + 1
        pause = min(policy.max_seconds, policy.first_seconds * policy.factor ** min(deaths - 1, 64))
        return replace(self, deaths=deaths), pause


def death_text(name: str, status: int, pause_seconds: float, reason: str = "") -> str:
    """Return the line about a process that has ended.

    Args:
        name: name of the process.
        status: its exit status; -N if signal N ended it.
        pause_seconds: time until its restart.
        reason: the error with which it ended; empty if it announced none.
    """
    ended = f"exited with status {status}"
    if status < 0 and -status in set(signal.Signals):
        number = signal.Signals(-status)
        ended = f"was ended by {number.name}" + (f" ({_CAUSES[number]})" if number in _CAUSES else "")
    if reason:
        ended += f": {reason}"
    return f"{name} {ended}; restarting in {pause_seconds:.1f} s"
