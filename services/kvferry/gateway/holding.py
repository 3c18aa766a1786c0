"""Requests that wait for a pool to have a worker, and when their waiting wakes the pool. No I/O.

A pool may be scaled to zero: then somebody must hold what arrives, and somebody must make the first step up. Both is
this gateway. It only ever asks for 1 where 0 was asked for, where the scaler allows it, and not twice in a hurry.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvferry.core.errors import Overloaded, Unavailable
from kvferry.gateway.config import HoldConfig

ROLES = ("prefill", "decode", "combined")
"""As scalers are named: `<pool>-<role>`."""
WAKE_ANNOTATION = "kvferry.dev/wake"
AGAIN_SECONDS = 5.0
"""Between two attempts to wake a role."""
_RETRY_AFTER_SECONDS = 5.0


class Holding:
    """Who waits. Used on the event loop's thread only."""

    def __init__(self, config: HoldConfig, pool: str) -> None:
        self._config = config
        self._pool = pool
        self.num_held = 0

    @property
    def seconds(self) -> float:
        """How long one waits at most."""
        return self._config.seconds

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait within the `with` block.

        Raises:
            Overloaded: as many wait already as may.
        """
        if self.num_held >= self._config.max_held:
            raise Overloaded(
                f"pool {self._pool} has no worker yet, and {self.num_held} requests wait for one; come back later",
                reason="POOL_EMPTY",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )
        self.num_held += 1
        try:
            yield
        finally:
            self.num_held -= 1

    def gave_up(self) -> Unavailable:
        """What one that waited in vain is told."""
        return Unavailable(
            f"pool {self._pool} had no worker for {self._config.seconds:g} s; /ready and /fleet say why",
            reason="POOL_EMPTY",
            retry_after_seconds=_RETRY_AFTER_SECONDS,
        )


@dataclass(frozen=True, slots=True)
class Scaler:
    """What matters of a role's scaler object."""

    role: str
    replicas: int
    may_wake: bool
    version: str
    """The object's; a change of replicas is only valid for it."""

    @classmethod
    def read(cls, role: str, found: Mapping[str, Any]) -> "Scaler | None":
        """From the object; `None`: it says no number of replicas, so it is not ours to change."""
        metadata, spec = found.get("metadata"), found.get("spec")
        metadata = metadata if isinstance(metadata, Mapping) else {}
        replicas = spec.get("replicas") if isinstance(spec, Mapping) else None
        annotations = metadata.get("annotations")
        may_wake = isinstance(annotations, Mapping) and annotations.get(WAKE_ANNOTATION) == "true"
        version = metadata.get("resourceVersion")
        if isinstance(replicas, bool) or not isinstance(replicas, int) or not isinstance(version, str):
            return None
        return cls(role, replicas, may_wake, version)


class WakePolicy:
    """Which roles to wake now."""

    def __init__(self) -> None:
        self._tried: dict[str, float] = {}

    def may_try(self, role: str, now: float) -> bool:
        """Whether enough time has passed since the last attempt."""
        tried = self._tried.get(role)
        return tried is None or now - tried >= AGAIN_SECONDS

    def choose(self, scalers: Iterable[Scaler], *, num_held: int, now: float) -> list[Scaler]:
        """Those to set to 1, noted as tried."""
        chosen = [
            scaler
            for scaler in scalers
            if num_held and scaler.may_wake and scaler.replicas == 0 and self.may_try(scaler.role, now)
        ]
        self._tried |= {scaler.role: now for scaler in chosen}
        return chosen
