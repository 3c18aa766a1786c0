"""When a process that died is started again: at once the first time, later each time, soon again after calm."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Exponential back-off with a memory that fades."""

    first_seconds: float = 0.2
    factor: float = 2.0
    most_seconds: float = 10.0
    calm_seconds: float = 30.0
    """A process that ran for so long is forgiven its past."""


@dataclass(frozen=True, slots=True)
class RestartHistory:
    """One process's past: how often it died without a calm run in between."""

    deaths: int = 0

    def after_death(self, policy: RestartPolicy, ran_seconds: float) -> tuple["RestartHistory", float]:
        """The new history and the seconds to wait before starting it again."""
        deaths = 1 if ran_seconds >= policy.calm_seconds else self.deaths + 1
        pause = min(policy.most_seconds, policy.first_seconds * policy.factor ** min(deaths - 1, 64))
        return replace(self, deaths=deaths), pause
