"""Delays before restarting an exited process: exponential backoff that resets after a long run."""

from dataclasses import dataclass, replace


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
