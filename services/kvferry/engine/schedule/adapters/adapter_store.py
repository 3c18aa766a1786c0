"""Registered adapters of one engine, and a cache (LRU) of their weights in the form that the kernels read.

    folder ──load──► host copy (bounded by `max_bytes`) ──activate──► slot (`engine.schedule.step.adapter_slots`)

An evicted copy is loaded again from its folder when a sequence needs it, on a thread while steps go on; the sequence
waits. If the folder has changed meanwhile, its digest differs and it is refused. A replaced or removed adapter is
*retired*: it serves the sequences that started with it and, for `RETIRED_SECONDS`, also new ones, since a request may
have started with it on another worker; then it is dropped.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from kvferry.core.errors import InvalidRequest, InvariantBroken, ModelFileError, UnknownModel, shortened
from kvferry.core.ids import AdapterId
from kvferry.engine.schedule.step.adapter_slots import PackedAdapter

MAX_ADAPTERS = 4096
"""Largest number of registered adapters."""
RETIRED_SECONDS = 60.0
"""Time for which a replaced or removed adapter serves requests that started with it on another worker."""
_MAX_RETIRED = 64
"""Largest number of retired adapters without sequences; more are dropped, oldest first."""

_MAX_LOADS = 2
"""Largest number of adapters that are loaded again at a time, for sequences that wait."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter read from its folder."""

    path: Path
    digest: bytes
    """Digest of its content, 32 bytes."""
    rank: int
    packed: PackedAdapter


@dataclass(slots=True)
class _Registered:
    path: Path
    rank: int
    packed: PackedAdapter | None
    used: int
    """Sequence number of the last use; larger is later."""
    retired_until: float | None = None
    """Monotonic seconds until which a replaced or removed adapter serves requests; `None` for the current version."""


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A registered adapter, for reports."""

    adapter: AdapterId
    rank: int
    retired_until: float | None
    """See `AdapterStore`; `None` for the current version."""


class AdapterStore:
    """Adapters of one engine. Used by the engine's thread only."""

    def __init__(self, *, max_bytes: int) -> None:
        """
        Args:
            max_bytes: memory for weights of adapters that have no slot.
        """
        self._max_bytes = max_bytes
        self._loading: set[AdapterId] = set()
        self._wanted: list[tuple[AdapterId, Path]] = []
        self._fresh: set[AdapterId] = set()
        """Adapters that were loaded for a sequence and have no slot yet; their copies are not evicted."""
        self._current: dict[str, AdapterId] = {}
        self._known: dict[AdapterId, _Registered] = {}
        self._uses = 0
        self.num_loads = 0
        """Adapters that were loaded again after their copy was evicted."""

    def add(self, name: str, loaded: LoadedAdapter, now: float = 0.0) -> AdapterId:
        """Register an adapter; an adapter of the same name is replaced.

        Args:
            name: its name.
            loaded: the adapter.
            now: monotonic seconds.

        Raises:
            InvalidRequest: too many adapters are registered.
        """
        if name not in self._current and len(self._current) >= MAX_ADAPTERS:
            raise InvalidRequest(
                f"{MAX_ADAPTERS} adapters are registered, which is the limit; unload one", field="lora_name"
            )
        adapter = AdapterId(name, loaded.digest)
        if name in self._current:
            self._retire(self._current[name], now)
        self._current[name] = adapter
        self._known[adapter] = _Registered(loaded.path, loaded.rank, loaded.packed, self._next_use())
        return adapter

    def remove(self, name: str, now: float = 0.0) -> AdapterId:
        """Remove an adapter; requests that started with it continue.

        Args:
            name: name of the adapter.
            now: current time in monotonic seconds; the version is retired for `RETIRED_SECONDS` from then on.

        Raises:
            UnknownModel: no adapter has this name.
        """
        if name not in self._current:
            raise UnknownModel(
                f"no adapter has the name {shortened(name)!r}; see the list of models", field="lora_name"
            )
        self._retire(self._current[name], now)
        return self._current.pop(name)

    def resolve(self, name: str) -> AdapterId:
        """Return the current version of an adapter.

        Raises:
            UnknownModel: no adapter has this name.
        """
        found = self._current.get(name)
        if found is None:
            raise UnknownModel(f"model {shortened(name)!r} is not served here; load it as an adapter", field="model")
        return found

    def check(self, adapter: AdapterId, now: float) -> None:
        """Check that a version of an adapter can serve a request.

        Args:
            adapter: version of the adapter.
            now: current time in monotonic seconds.

        Raises:
            UnknownModel: the version is not registered, or was retired too long ago.
        """
        known = self._known.get(adapter)
        if known is None or not (known.retired_until is None or now < known.retired_until):
            raise UnknownModel(
                f"this version of adapter {shortened(adapter.name)!r} is not loaded here; load it, or retry with "
                "the loaded version",
                reason="ADAPTER_NOT_LOADED",
                field="model",
            )

    def is_ready(self, adapter: AdapterId) -> bool:
        """Return whether an adapter's weights are in memory. If not, they are loaded (`take_wanted`), unless too many
        others are being loaded."""
        known = self._known[adapter]
        if known.packed is not None:
            return True
        if adapter not in self._loading and len(self._loading) < _MAX_LOADS:
            self._loading.add(adapter)
            self._wanted.append((adapter, known.path))
        return False

    def take_wanted(self) -> list[tuple[AdapterId, Path]]:
        """Return the adapters to load since the last call, with their folders; each ends with `loaded` or `failed`."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def loaded(self, adapter: AdapterId, loaded: LoadedAdapter) -> None:
        """Take the weights of an adapter that was loaded again; no effect if it was dropped meanwhile.

        Raises:
            ModelFileError: the folder's content has changed since the adapter was registered.
        """
        self._loading.discard(adapter)
        known = self._known.get(adapter)
        if known is None:
            return
        if loaded.digest != adapter.digest:
            raise ModelFileError(
                f"{known.path} has changed since adapter {adapter.name!r} was loaded; load it again",
                reason="ADAPTER_CHANGED",
            )
        known.packed, known.used = loaded.packed, self._next_use()
        self._fresh.add(adapter)
        self.num_loads += 1

    def failed(self, adapter: AdapterId) -> None:
        """Record that an adapter could not be loaded; the next sequence that needs it tries again."""
        self._loading.discard(adapter)

    def weights(self, adapter: AdapterId) -> PackedAdapter:
        """Return the weights of an adapter that is ready.

        Raises:
            InvariantBroken: they are not in memory.
        """
        known = self._known[adapter]
        known.used = self._next_use()
        self._fresh.discard(adapter)
        if known.packed is None:
            raise InvariantBroken(f"adapter {adapter.name!r} was put into a slot before it was loaded")
        return known.packed

    def trim(
        self, used: Collection[AdapterId], active: Callable[[AdapterId], bool], now: float = 0.0
    ) -> list[AdapterId]:
        """Drop retired adapters that no request can use, and evict copies beyond the memory limit.

        Args:
            now: monotonic seconds.
            used: adapters of all sequences.
            active: whether an adapter has a slot; such copies are not evicted, since that would free no memory.

        Returns:
            The adapters that were dropped.
        """
        retired = [
            (known.retired_until, a)
            for a, known in self._known.items()
            if known.retired_until is not None and a not in used
        ]
        retired.sort()
        excess = len(retired) - _MAX_RETIRED
        dropped = [a for index, (until, a) in enumerate(retired) if until <= now or index < excess]
        for adapter in dropped:
            del self._known[adapter]
        self._fresh.intersection_update(used)
        held = [(known.used, a) for a, known in self._known.items() if known.packed is not None]
        total = sum(known.packed.num_bytes for known in self._known.values() if known.packed is not None)
        for _, adapter in sorted(held):
            if total <= self._max_bytes:
                break
            known = self._known[adapter]
            # A retired adapter cannot be loaded again: its folder may have new content.
            if known.packed is None or active(adapter) or known.retired_until is not None or adapter in self._fresh:
                continue
            total -= known.packed.num_bytes
            known.packed = None
        return dropped

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        """All adapters, including retired ones, sorted by name."""
        found = sorted(self._known.items(), key=lambda item: item[0])
        return tuple(AdapterInfo(adapter, known.rank, known.retired_until) for adapter, known in found)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights in host memory."""
        return sum(known.packed.num_bytes for known in self._known.values() if known.packed is not None)

    def _retire(self, adapter: AdapterId, now: float) -> None:
        self._known[adapter].retired_until = now + RETIRED_SECONDS

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses
