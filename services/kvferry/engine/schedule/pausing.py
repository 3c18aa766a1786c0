"""Pauses of an engine: new requests are held in front of the scheduler, and running ones end, stop or run on. Pure.

    mode     new requests   running requests                 requests that continue (they have tokens of another worker)
    wait     held           run until they are complete      run
    keep     held           get no step, keep their pages    held
    abort    held           end, with finish reason abort    end

A held request is not known to the scheduler: it has no pages, and no load or lookup is started for it.
"""

from collections.abc import Callable
from dataclasses import replace

from kvferry.core.errors import KvferryError, Unavailable
from kvferry.core.ids import RequestId
from kvferry.core.pausing import PauseMode
from kvferry.core.sampling import FinishReason
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.plan.scheduler import Scheduler
from kvferry.engine.schedule.step.kv_jobs import SequenceUpdate


class Pausing:
    """The pause of one engine and the requests that it holds. Not thread-safe."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        add: Callable[[EngineRequest], None],
        end: Callable[[RequestId], bool],
    ) -> None:
        """
        Args:
            scheduler: the engine's scheduler.
            add: adds a request to the engine, once it is no longer held.
            end: ends a request of the scheduler and frees what it holds.
        """
        self._scheduler = scheduler
        self._add = add
        self._end = end
        self._held: dict[RequestId, EngineRequest] = {}
        self._ended: list[SequenceUpdate] = []
        self.mode: PauseMode | None = None
        """Mode of the pause; `None` while the engine generates."""

    def pause(self, mode: PauseMode) -> None:
        """Pause, or change the mode of a pause: the last mode applies to all requests."""
        self.mode = mode
        if mode is PauseMode.ABORT:
            for sequence in list(self._scheduler.sequences):
                request_id, is_vector = sequence.request_id, sequence.sampling.pooling is not None
                self._end(request_id)
                self._ended.append(_aborted(request_id, is_vector=is_vector, num_cached=sequence.kv.account.num_cached))
        if mode is not PauseMode.KEEP:
            self._release([request for request in self._held.values() if request.num_generated])

    def resume(self) -> None:
        """Generate again: add the held requests in their order of arrival. Idempotent."""
        self.mode = None
        self._release(list(self._held.values()))

    def takes(self, request: EngineRequest) -> bool:
        """Return whether the pause keeps an arriving request from the scheduler: it is then held, or has ended."""
        if self.mode is None or (self.mode is PauseMode.WAIT and request.num_generated):
            return False
        if self.mode is PauseMode.ABORT and request.num_generated:
            self._ended.append(_aborted(request.request_id, is_vector=False))
        else:
            self._held[request.request_id] = request
        return True

    def forget(self, request_id: RequestId) -> bool:
        """Drop a held request; return whether it was held."""
        return self._held.pop(request_id, None) is not None

    def forget_remote(self) -> None:
        """Compute the prompts of all held requests, because the KV that peers offer was computed with other weights."""
        self._held = {name: replace(request, remote=None) for name, request in self._held.items()}

    def take_ended(self) -> list[SequenceUpdate]:
        """Return the updates of the requests that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def has_ended(self) -> bool:
        """Whether `take_ended` would return updates."""
        return bool(self._ended)

    @property
    def plans_steps(self) -> bool:
        """Whether the scheduler plans steps."""
        return self.mode is None or self.mode is PauseMode.WAIT

    @property
    def num_held(self) -> int:
        """Number of held requests."""
        return len(self._held)

    def is_settled(self, *, num_in_flight: int) -> bool:
        """Return whether the pause is in effect: no step and no load is in flight, and requests that do not stop have
        ended.

        Args:
            num_in_flight: number of launched steps, loads and prefetches.
        """
        is_over = self.mode is PauseMode.KEEP or self._scheduler.is_idle
        return self.mode is not None and is_over and not num_in_flight and not self._ended

    def _release(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            del self._held[request.request_id]
            try:
                self._add(request)
            except KvferryError as error:  # for example, its adapter was removed meanwhile
                self._ended.append(SequenceUpdate(request.request_id, (), None, 0, error=error))


def _aborted(request_id: RequestId, *, is_vector: bool, num_cached: int = 0) -> SequenceUpdate:
    """Return the last update of a request that a pause ends; a vector has no partial result."""
    if is_vector:
        error = Unavailable("generation was paused, which ended this request; retry", reason="GENERATION_PAUSED")
        return SequenceUpdate(request_id, (), None, num_cached, error=error)
    return SequenceUpdate(request_id, (), FinishReason.ABORT, num_cached)
