"""Decides for the requests of one pool: reads bodies, waits while the pool is saturated, chooses, counts."""

import asyncio
import logging
import random
from collections.abc import Mapping

from kvferry.core.clock import Clock
from kvferry.gateway.decide.flow.fair_queue import EntryState, QueueEntry
from kvferry.picker.config import PickerConfig
from kvferry.picker.decide import headers as names
from kvferry.picker.decide.choice import EndpointChoice, Picked, PickRequest
from kvferry.picker.decide.endpoints import EndpointStates
from kvferry.picker.decide.exchange import Ask, Refusal
from kvferry.picker.decide.prompt_body import read_body
from kvferry.picker.decide.saturation import SaturationQueue
from kvferry.picker.picker_metrics import PickerMetrics

_log = logging.getLogger(__name__)


class PoolPicker:
    """The decisions for one pool. Used on one event loop."""

    def __init__(
        self, config: PickerConfig, clock: Clock, metrics: PickerMetrics, draws: random.Random | None = None
    ) -> None:
        """
        Args:
            config: all settings.
            clock: clock of loads and waits.
            metrics: metrics of the decisions.
            draws: random numbers of the choice; `None` seeds from the operating system.
        """
        self._config = config
        self._clock = clock
        self._metrics = metrics
        self.states = EndpointStates(
            clock, scrape_seconds=config.scrape.seconds, stale_seconds=config.scrape.stale_seconds
        )
        # A load balancer needs no secrecy.
        self.choice = EndpointChoice(self.states, config.choice, clock, draws or random.Random())  # noqa: S311
        self.queue = SaturationQueue(config.saturation)
        self._waiting: dict[QueueEntry, asyncio.Event] = {}

    def is_saturated(self, subset: tuple[str, ...] | None = None) -> bool:
        """Return whether all endpoints that may answer are full."""
        bounds = self._config.saturation
        return self.choice.is_saturated(subset, max_waiting=bounds.max_waiting, max_usage=bounds.max_usage)

    async def decide(
        self, ask: Ask, headers: Mapping[str, str], subset: tuple[str, ...] | None
    ) -> tuple[Picked | Refusal, QueueEntry | None]:
        """Return the decision for a request, and its entry if it has waited, which `ended` takes.

        Args:
            ask: the request's body.
            headers: the request's headers.
            subset: endpoints of which one must be chosen; `None` for all.
        """
        began = self._clock.monotonic()
        prompt = read_body(ask.body, is_cut=ask.is_cut)
        self._metrics.read(prompt.problem)
        request = PickRequest(prompt, subset)
        entry = None
        if self.queue or self.is_saturated(subset):
            fairness = headers.get(names.FAIRNESS, "")
            objective = headers.get(names.OBJECTIVE, "")
            entered = self.queue.enter(objective, fairness, prompt.num_tokens, is_saturated=True)
            if isinstance(entered, Refusal):
                return self._refused(entered), None
            if entered is not None:
                entry = entered
                self._wake_displaced()
                await self._wait(entry)
                if entry.state is EntryState.REFUSED:
                    refused = Refusal(429, "displaced by a request of a higher priority; retry later", "displaced", 1.0)
                    return self._refused(refused), None
        picked = self.choice.pick(request)
        if isinstance(picked, Refusal):
            if entry is not None:
                self.queue.end(entry)
            return self._refused(picked), None
        self._metrics.picked(picked, self._clock.monotonic() - began)
        if entry is not None:
            self.loads_changed()  # the next one, if there is still room
        return picked, entry

    async def _wait(self, entry: QueueEntry) -> None:
        """Wait until the entry passes, is displaced, or has waited for long enough. A cancelled wait leaves the
        queue."""
        event = self._waiting[entry] = asyncio.Event()
        self._metrics.queued(len(self.queue))
        try:
            async with asyncio.timeout(self._config.saturation.queue_seconds):
                while entry.state is EntryState.QUEUED:
                    await event.wait()
                    event.clear()
        except TimeoutError:
            self.queue.end(entry)
        except asyncio.CancelledError:
            self.queue.end(entry)
            raise
        finally:
            del self._waiting[entry]
            self._metrics.queued(len(self.queue))

    def loads_changed(self) -> None:
        """Let the next waiting request pass if there is room; call after each page and each end of a request. One at a
        time, since only its choice shows how much room is left."""
        if not self.queue or self.is_saturated():
            return
        entry = self.queue.release()
        if entry is not None and entry in self._waiting:
            self._waiting[entry].set()

    def _wake_displaced(self) -> None:
        for entry, event in self._waiting.items():
            if entry.state is EntryState.REFUSED:
                event.set()

    def ended(self, picked: Picked, entry: QueueEntry | None, *, is_known: bool) -> None:
        """Note that a request has ended.

        Args:
            picked: its decision.
            entry: its entry in the queue, if it has waited.
            is_known: whether its response has ended; see `EndpointStates.ended`.
        """
        self.states.ended(picked.sent, is_known=is_known)
        if entry is not None:
            self.queue.end(entry)
        self.loads_changed()

    def _refused(self, refused: Refusal) -> Refusal:
        self._metrics.refused(refused)
        _log.info("refused with %d: %s", refused.status, refused.message)
        return refused
