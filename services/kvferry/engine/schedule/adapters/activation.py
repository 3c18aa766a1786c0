"""Activation of an engine's adapters: changes of the registered ones, and the weights in the runner's slots. Pure."""

from collections.abc import Callable
from pathlib import Path

from kvferry.core.clock import Clock
from kvferry.core.errors import InvalidRequest, KvferryError
from kvferry.core.ids import AdapterId, RequestId
from kvferry.engine.schedule.adapters.adapter_store import AdapterStore, LoadedAdapter
from kvferry.engine.schedule.plan.scheduler import Scheduler
from kvferry.engine.schedule.step.adapter_slots import NO_SLOT, PackedAdapter
from kvferry.engine.schedule.step.kv_jobs import SequenceUpdate


class AdapterActivation:
    """Changes the registered adapters of an engine, and puts adapters into slots. Owned by the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        store: AdapterStore | None,
        activate: Callable[[int, PackedAdapter], None] | None,
        clock: Clock,
        abort: Callable[[RequestId], object],
    ) -> None:
        """
        Args:
            scheduler: the engine's scheduler, which has the slots.
            store: the registered adapters; `None` if the engine does not support adapters.
            activate: puts an adapter into a slot of the runner.
            clock: measures how long removed versions are kept.
            abort: ends a sequence whose adapter cannot be loaded.
        """
        self._scheduler = scheduler
        self._store = store
        self._activate = activate
        self._clock = clock
        self._abort = abort
        self._failed: list[SequenceUpdate] = []

    def change(self, name: str, loaded: LoadedAdapter | None) -> AdapterId:
        """Register an adapter, replace the one of the same name, or remove it; running requests keep their version.

        Args:
            name: name of the adapter.
            loaded: the adapter to register; `None` to remove the one of this name.

        Raises:
            InvalidRequest: the engine does not support adapters, or too many are registered.
            UnknownModel: there is no adapter with this name to remove.
        """
        if self._store is None:
            raise InvalidRequest("this engine does not support adapters; set adapter_slots", field="adapter_slots")
        now = self._clock.monotonic()
        adapter = self._store.remove(name, now) if loaded is None else self._store.add(name, loaded, now)
        self._trim(self._store)
        return adapter

    def apply(self) -> None:
        """Put the adapters of newly admitted sequences into their slots."""
        activations = self._scheduler.slots.take_activations()
        if not activations or self._store is None or self._activate is None:
            return
        for slot, adapter in activations:
            self._activate(slot, self._store.weights(adapter))
        self._trim(self._store)

    def take_wanted(self) -> list[tuple[AdapterId, Path]]:
        """Return the adapters to load since the last call, with their folders."""
        return [] if self._store is None else self._store.take_wanted()

    def loaded(self, adapter: AdapterId, outcome: LoadedAdapter | KvferryError) -> None:
        """Take an adapter that was loaded again. If it could not be, the sequences that wait for it end
        (`take_failed`).

        Args:
            adapter: the adapter.
            outcome: its weights, or the error.
        """
        if self._store is None:
            return
        try:
            if isinstance(outcome, KvferryError):
                self._store.failed(adapter)
                raise outcome
            self._store.loaded(adapter, outcome)
        except KvferryError as error:
            waiting = [
                s for s in self._scheduler.sequences if s.request.adapter == adapter and s.adapter_slot == NO_SLOT
            ]
            for sequence in waiting:
                self._abort(sequence.request_id)
                self._failed.append(
                    SequenceUpdate(sequence.request_id, (), None, sequence.kv.account.num_cached, error=error)
                )

    @property
    def has_failed(self) -> bool:
        """Whether `take_failed` returns sequences."""
        return bool(self._failed)

    def take_failed(self) -> list[SequenceUpdate]:
        """Return the sequences that ended since the last call, because their adapter could not be loaded."""
        failed, self._failed = self._failed, []
        return failed

    def _trim(self, store: AdapterStore) -> None:
        for adapter in store.trim(
            {s.request.adapter for s in self._scheduler.sequences if s.request.adapter is not None},
            self._scheduler.slots.holds,
            self._clock.monotonic(),
        ):
            self._scheduler.slots.forget(adapter)
