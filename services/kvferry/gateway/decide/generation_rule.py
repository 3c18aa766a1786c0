"""The pool's pause and weights, as one gateway knows them, and which workers are behind. Pure.

The newest state that any worker reports is the pool's. A worker with an older one accepts no requests until it has been
sent the newest.
"""

from dataclasses import dataclass, field

from kvferry.core.pausing import PauseMode, PauseState

_MAX_NOTED = 4096


@dataclass(frozen=True, slots=True)
class PoolWeights:
    """The weights of a worker or a pool."""

    revision: int = 0
    """Number of the update that loaded them; 0: those of the start."""
    version: str = ""
    digest: str = ""
    path: str = ""
    """Path of their checkpoint, as given; empty for those of the start."""


@dataclass(slots=True)
class GenerationRule:
    """The states of one gateway's pool."""

    pause: PauseState = field(default_factory=PauseState)
    weights: PoolWeights = field(default_factory=PoolWeights)
    is_changing: bool = False
    """Whether this gateway is changing one of them: workers differ meanwhile, and none is refused for it."""
    _noted: dict[str, tuple[PauseState, PoolWeights]] = field(default_factory=dict)
    """Newest state of each worker by incarnation, which its next status may not show yet."""

    def saw(self, incarnation: str, pause: PauseState, weights: PoolWeights) -> None:
        """Note the state of a worker, and take it as the pool's if it is newer.

        Args:
            incarnation: incarnation of the worker.
            pause: its pause.
            weights: its weights.
        """
        known_pause, known_weights = self.of(incarnation)
        if len(self._noted) >= _MAX_NOTED:
            self._noted.clear()
        newest = (
            pause if pause.revision >= known_pause.revision else known_pause,
            weights if weights.digest and weights.revision >= known_weights.revision else known_weights,
        )
        self._noted[incarnation] = newest
        if self.is_changing:
            return
        if newest[0].revision > self.pause.revision:
            self.pause = newest[0]
        if newest[1].revision > self.weights.revision or not self.weights.digest:
            self.weights = newest[1]

    def of(self, incarnation: str) -> tuple[PauseState, PoolWeights]:
        """Return the newest known state of a worker."""
        return self._noted.get(incarnation, (PauseState(), PoolWeights()))

    def refusal(self, incarnation: str) -> str:
        """Return why a worker accepts no requests, because its state is not the pool's; empty if it is.

        Args:
            incarnation: incarnation of the worker.
        """
        pause, weights = self.of(incarnation)
        if self.is_changing:
            return ""
        if weights.revision != self.weights.revision:
            return f"has weights {weights.version!r}, and the pool has {self.weights.version!r}"
        if pause.mode != self.pause.mode and pause.revision < self.pause.revision:
            return "is not paused yet, and the pool is" if self.pause.mode else "is still paused"
        return ""

    def note(self, now: float) -> str:
        """Return a line about the pause for people; empty without one.

        Args:
            now: seconds since the epoch.
        """
        mode, by = self.pause.mode, self.pause.by or "an administrator"
        if mode is None:
            return ""
        return f"generation is paused since {max(0.0, now - self.pause.since):.0f} s by {by} (mode {mode.value})"

    def starts_steps(self, incarnation: str) -> bool:
        """Return whether a worker makes steps if it has running sequences."""
        return self.of(incarnation)[0].mode in (None, PauseMode.WAIT)
