"""Decides how many requests are held until a pool has a worker, and when a held request scales the pool up. No I/O.

A pool may be scaled to zero: the gateway then holds requests and starts the first replica. It changes replica counts
only from 0 to 1, only if the scaler allows it, and at most once per `AGAIN_SECONDS` and role.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvferry.core.errors import Overloaded, Unavailable
from kvferry.gateway.decide.config import HoldConfig

ROLES = ("prefill", "decode", "both")
"""Roles that have a scaler object, named `<pool>-<role>`."""
WAKE_ANNOTATION = "kvferry.dev/wake"
AGAIN_SECONDS = 5.0
"""Minimum interval in seconds between two attempts to scale up a role."""
_RETRY_AFTER_SECONDS = 5.0


class Holding:
    """Counts held samples and limits their number. Used on the event loop's thread only."""

    def __init__(self, config: HoldConfig, pool: str) -> None:
        self._config = config
        self._pool = pool
        self.num_held = 0

    @property
    def seconds(self) -> float:
        """Maximum time in seconds for which a sample is held."""
        return self._config.seconds

    @contextmanager
    def held(self, count: int = 1) -> Iterator[None]:
        """Count `count` samples as held during the `with` block.

        Raises:
            Overloaded: `max_held` samples are already held.
        """
        max_held = self._config.max_held
        # A request with more than `max_held` samples is held if no other request is.
        if self.num_held >= max_held or self.num_held + count > max(max_held, count):
            raise Overloaded(
                f"pool {self._pool} has no workers yet, and {self.num_held} requests are waiting; retry later",
                reason="POOL_EMPTY",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )
        self.num_held += count
        try:
            yield
        finally:
            self.num_held -= count

    def gave_up(self) -> Unavailable:
        """Return the error for a request that was held for the maximum time without a worker becoming available."""
        return Unavailable(
            f"pool {self._pool} had no workers for {self._config.seconds:g} s; see /ready and /fleet for the reasons",
            reason="POOL_EMPTY",
            retry_after_seconds=_RETRY_AFTER_SECONDS,
        )


@dataclass(frozen=True, slots=True)
class Scaler:
    """Fields of a role's `PoolRoleScaler` object that decide whether to scale it up."""

    role: str
    replicas: int
    may_wake: bool
    version: str
    """The object's resource version; an update is valid only for this version."""

    @classmethod
    def read(cls, role: str, found: Mapping[str, Any]) -> "Scaler | None":
        """Parse the object; `None` if it has no replica count, in which case it must not be changed.

        Args:
            role: role of the workers that the object scales.
            found: the object's JSON.
        """
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
    """Decides which roles to scale up from zero."""

    def __init__(self) -> None:
        self._tried: dict[str, float] = {}

    def may_try(self, role: str, now: float) -> bool:
        """Return whether `AGAIN_SECONDS` have passed since the last attempt for this role.

        Args:
            role: role of the workers.
            now: monotonic seconds.
        """
        tried = self._tried.get(role)
        return tried is None or now - tried >= AGAIN_SECONDS

    def choose(self, scalers: Iterable[Scaler], *, num_held: int, now: float) -> list[Scaler]:
        """Return the scalers whose replica counts should be set to 1; record an attempt for each.

        Args:
            scalers: the scalers of the pool.
            num_held: number of requests that wait for a worker.
            now: monotonic seconds.
        """
        chosen = [
            scaler
            for scaler in scalers
            if num_held and scaler.may_wake and scaler.replicas == 0 and self.may_try(scaler.role, now)
        ]
        self._tried |= {scaler.role: now for scaler in chosen}
        return chosen
