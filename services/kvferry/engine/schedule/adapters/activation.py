"""Activation of an engine's adapters: changes of the registered ones, and the weights in the runner's slots. Pure."""

from collections.abc import Callable
from dataclasses import replace

from kvferry.core.clock import Clock
from kvferry.core.errors import InvalidRequest, KvferryError
from kvferry.core.ids import AdapterId, RequestId
from kvferry.engine.schedule.adapters.adapter_store import AdapterStore, LoadedAdapter
from kvferry.engine.schedule.plan.scheduler import Scheduler
from kvferry.engine.schedule.step.adapter_slots import NO_SLOT, PackedAdapter
from kvferry.engine.schedule.step.kv_jobs import SequenceUpdate
from kvferry.engine.schedule.step.step import StepPlan


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

    def apply(self, plan: StepPlan) -> tuple[StepPlan, list[SequenceUpdate]]:
        """Put the adapters of newly admitted sequences into their slots. Sequences whose adapter cannot be loaded end;
        they are not in the returned plan."""
        activations = self._scheduler.slots.take_activations()
        if not activations or self._store is None or self._activate is None:
            return plan, []
        failed: list[SequenceUpdate] = []
        for slot, adapter in activations:
            try:
                self._activate(slot, self._store.weights(adapter))
            except KvferryError as error:
                failed += self._fail(adapter, error)
        self._trim(self._store)
        if failed:
            plan = replace(plan, scheduled=tuple(filter(self._scheduler.has_sequence, plan.scheduled)))
        return plan, failed

    def _fail(self, adapter: AdapterId, error: KvferryError) -> list[SequenceUpdate]:
        """End the admitted sequences of an adapter whose weights cannot be loaded."""
        failed = [s for s in self._scheduler.sequences if s.adapter == adapter and s.adapter_slot != NO_SLOT]
        for sequence in failed:
            self._abort(sequence.request_id)
        self._scheduler.slots.forget(adapter)
        return [SequenceUpdate(s.request_id, (), None, s.num_cached, error=error) for s in failed]

    def _trim(self, store: AdapterStore) -> None:
        for adapter in store.trim(
            {s.adapter for s in self._scheduler.sequences if s.adapter is not None},
            self._scheduler.slots.holds,
            self._clock.monotonic(),
        ):
            self._scheduler.slots.forget(adapter)
