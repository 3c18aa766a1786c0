"""Pins prefixes on all workers that compute prompts, and again on workers that join or restart later.

    POST /pin_prefix ──► book ──► PinPrefix on each worker that accepts requests
    change of the fleet ──► each worker that lacks a prefix of the book ──► PinPrefix with the remaining time to live

A worker is identified by its incarnation, so a restarted worker has no pins. A worker whose status reports fewer pins
than were made on it has lost some, for example because an adapter was replaced; all are then made again, which has no
effect on those that it still has.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import grpc

from kvferry.core.clock import Clock
from kvferry.core.errors import InvalidRequest, KvferryError, Unavailable, UnknownModel
from kvferry.core.hashing import cache_scope
from kvferry.core.ids import AdapterId, Incarnation
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.gateway.fleet.member import WorkerView
from kvferry.gateway.fleet.pins.pin_book import PinBook, Prefix
from kvferry.rpc.errors import error_from_rpc
from kvferry.rpc.worker_wire import adapter_to_wire
from kvferry.v1 import worker_admin_pb2 as wire

_log = logging.getLogger(__name__)
_PIN_SECONDS = 300.0
"""Deadline of a pin, which computes the prefix."""
_UNPIN_SECONDS = 30.0
_ROUND_SECONDS = 0.25
"""Shortest time between two rounds over the workers."""
_RETRY_SECONDS = 30.0
"""Seconds after a failed pin before it is tried again on the same worker."""
_LOST_SECONDS = 5.0
"""Seconds for which a worker must report fewer pins than were made, because statuses are late."""
ROLES = ("prefill", "both")
"""Roles of the workers that compute prompts."""


@dataclass(slots=True)
class _Placed:
    """Pins that were made on one incarnation of a worker."""

    names: dict[bytes, bytes] = field(default_factory=dict)
    """The worker's name of the pin, by key of the prefix; prefixes with the same full blocks have one pin."""
    retry_at: dict[bytes, float] = field(default_factory=dict)
    """Time of the next attempt, monotonic seconds, by key of a prefix that the worker did not pin."""
    short_since: float | None = None
    """Time since which the worker has reported fewer pins than were made; `None` if it reports all."""
    task: asyncio.Task[None] | None = None
    """Makes the pins that the worker lacks; `None` before the first attempt."""


@dataclass(frozen=True, slots=True)
class WorkerPin:
    """The pin of a prefix on one worker."""

    address: str
    num_tokens: int
    """Number of tokens in full blocks; 0 if the worker had no such pin."""
    num_blocks: int
    seconds_left: float


class FleetPins:
    """Pinned prefixes of one gateway's fleet."""

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self._fleet = fleet
        self._clock = clock
        self._book = PinBook()
        self._placed: dict[Incarnation, _Placed] = {}

    async def pin(self, prefix: Prefix, ttl_seconds: float) -> tuple[list[WorkerPin], list[str]]:
        """Pin a prefix on every worker that computes prompts and accepts requests, or extend its time to live. Return
        the pins, and the addresses of the workers that will pin it when they accept requests.

        Args:
            prefix: the prefix.
            ttl_seconds: time to live from now on.

        Raises:
            Overloaded: this gateway has too many prefixes.
            InvalidRequest: the prefix is empty, or its time to live ended before a worker had computed it.
            Unavailable: there is no worker to pin it on, or the prefix was unpinned before a worker had computed it.
            KvferryError: a worker refused it; the message names the worker. If others pinned it, it stays registered,
                and is tried again on this worker.
        """
        if not prefix.token_ids:
            raise InvalidRequest("the prefix is empty; send at least one block of tokens", field="prompt")
        views = self._views()
        ready = [view for view in views if view.takes_work]
        if not ready:
            raise Unavailable(
                "no worker that computes prompts accepts requests; start one, then retry", retry_after_seconds=1.0
            )
        deadline = self._clock.monotonic() + ttl_seconds
        is_new = self._book.add(prefix, deadline)
        results = await asyncio.gather(*(self._place(view, prefix) for view in ready), return_exceptions=True)
        pins: list[WorkerPin] = []
        failed: list[tuple[str, KvferryError]] = []
        for view, result in zip(ready, results, strict=True):
            if isinstance(result, KvferryError):
                failed.append((view.endpoint.address, result))
            elif isinstance(result, BaseException):
                raise result
            elif result is not None:
                pins.append(result)
        if failed:
            if is_new and not pins:
                self._book.remove(prefix.key)
            address, error = failed[0]
            rest = "; the others pinned it, and the gateway retries on this worker" if pins else ""
            error.message = (
                f"{len(failed)} of {len(ready)} workers did not pin the prefix, {address}: {error.message}{rest}"
            )
            if isinstance(error, InvalidRequest) and error.field == "token_ids":
                error.field = "prompt"
            raise error
        if not pins:
            raise self._ended_early(deadline, ttl_seconds)
        return pins, [view.endpoint.address for view in views if not view.takes_work]

    async def unpin(self, prefix: Prefix) -> list[WorkerPin]:
        """Remove a prefix and end its pins; return them by worker. Idempotent.

        Raises:
            Unavailable: a worker did not confirm; the message names it. The pins of the others have ended.
        """
        self._book.remove(prefix.key)
        views = self._views()
        results = await asyncio.gather(*(self._unplace(view, prefix) for view in views), return_exceptions=True)
        ended: list[WorkerPin] = []
        failed: list[str] = []
        for view, result in zip(views, results, strict=True):
            if isinstance(result, KvferryError):
                failed.append(f"{view.endpoint.address} ({result.reason})")
            elif isinstance(result, BaseException):
                raise result
            else:
                ended.append(result)
        if failed:
            raise Unavailable(
                f"{len(failed)} of {len(views)} workers did not confirm: {', '.join(failed[:8])}; the pins of the "
                "others have ended; retry",
                reason="UNPIN_INCOMPLETE",
            )
        return ended

    def clear(self) -> None:
        """Remove all prefixes, without calls to workers: a reset of their caches ends the pins."""
        self._book.clear()
        for placed in self._placed.values():
            placed.names.clear()
            placed.retry_at.clear()

    def report(self) -> Mapping[str, object]:
        """Return the body of `GET /pins`."""
        now = self._clock.monotonic()
        self._book.expire(now)
        views = self._views()
        return {
            "pins": [
                {
                    "id": prefix.key.hex()[:16],
                    "model": prefix.model,
                    "tenant": prefix.tenant,
                    "has_cache_salt": bool(prefix.cache_salt),
                    "num_tokens": len(prefix.token_ids),
                    "seconds_left": deadline - now,
                    "workers": [view.endpoint.address for view in views if self._has(view, prefix)],
                }
                for prefix, deadline in self._book.items()
            ],
            "workers": [
                {
                    "address": view.endpoint.address,
                    "pins": view.load.pins,
                    "blocks_pinned": view.load.blocks_pinned,
                    "blocks_total": view.load.blocks_total,
                }
                for view in views
            ],
        }

    async def run(self) -> None:
        """Pin the registered prefixes on workers that lack them, until cancelled."""
        begun = -_ROUND_SECONDS
        try:
            while True:
                if self._clock.monotonic() - begun >= _ROUND_SECONDS:
                    begun = self._clock.monotonic()
                    self.begin_round(begun)
                await self._fleet.next_change()
        finally:
            tasks = [placed.task for placed in self._placed.values() if placed.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def begin_round(self, now: float) -> int:
        """Start a task for each worker that lacks a registered prefix and has no such task; return the number of
        tasks.

        Args:
            now: current time, monotonic seconds.
        """
        self._book.expire(now)
        views = {view.incarnation: view for view in self._views() if view.incarnation is not None}
        for incarnation in self._placed.keys() - views.keys():
            placed = self._placed[incarnation]
            if placed.task is None or placed.task.done():
                del self._placed[incarnation]
        if not len(self._book):
            return 0
        num_begun = 0
        for incarnation, view in views.items():
            placed = self._placed.setdefault(incarnation, _Placed())
            if placed.task is not None and not placed.task.done():
                continue
            self._note_lost(view, placed, now)
            lacking = self._book.lacking(placed.names) if view.takes_work else []
            due = [prefix for prefix in lacking if placed.retry_at.get(prefix.key, now) <= now]
            if due:
                placed.task = asyncio.create_task(self._place_all(view, due), name=f"pin {view.endpoint.address}")
                num_begun += 1
        return num_begun

    # ------------------------------------------------------------------ internals

    def _ended_early(self, deadline: float, ttl_seconds: float) -> KvferryError:
        """Return the error for a prefix that was not registered any more when the workers had computed it."""
        if self._clock.monotonic() >= deadline:
            return InvalidRequest(
                f"the time to live of {ttl_seconds:g} s ended before the prefix was computed; set a longer ttl_seconds",
                field="ttl_seconds",
                reason="PIN_EXPIRED",
            )
        return Unavailable(
            "the prefix was unpinned, the caches were reset, or its workers were removed while it was computed; pin "
            "it again",
            reason="PIN_ENDED",
        )

    def _views(self) -> list[WorkerView]:
        return [view for view in self._fleet.views() if view.role in ROLES]

    def _has(self, view: WorkerView, prefix: Prefix) -> bool:
        placed = None if view.incarnation is None else self._placed.get(view.incarnation)
        return placed is not None and prefix.key in placed.names

    def _note_lost(self, view: WorkerView, placed: _Placed, now: float) -> None:
        """Drop the records of a worker's pins if it has reported fewer for some time, so that they are made again."""
        for key in [key for key in placed.names if key not in self._book]:
            del placed.names[key]
        if view.load.pins >= len(set(placed.names.values())):
            placed.short_since = None
        elif placed.short_since is None:
            placed.short_since = now
        elif now - placed.short_since >= _LOST_SECONDS:
            placed.names.clear()
            placed.short_since = None

    async def _place_all(self, view: WorkerView, prefixes: Sequence[Prefix]) -> None:
        """Pin prefixes on a worker, one after another; failures are logged, and tried again later."""
        for prefix in prefixes:
            try:
                await self._place(view, prefix)
            except KvferryError as error:
                _log.warning("worker %s did not pin a prefix: %s", view.endpoint.address, error.message)

    async def _place(self, view: WorkerView, prefix: Prefix) -> WorkerPin | None:
        """Pin a prefix on a worker for its remaining time to live; return `None` if it is not registered any more, or
        the worker was removed.

        Raises:
            KvferryError: the worker did not pin it.
        """
        deadline = self._book.deadline(prefix.key)
        if deadline is None or view.incarnation is None:
            return None
        seconds = deadline - self._clock.monotonic()
        if seconds <= 0:
            return None
        placed = self._placed.setdefault(view.incarnation, _Placed())
        try:
            pin = await self._call(view, prefix, seconds)
        except KvferryError:
            placed.retry_at[prefix.key] = self._clock.monotonic() + _RETRY_SECONDS
            raise
        if pin is None:
            return None
        placed.retry_at.pop(prefix.key, None)
        if prefix.key not in self._book:  # it was unpinned during the call
            await self._unplace(view, prefix)
            return None
        placed.names[prefix.key] = pin.name
        return WorkerPin(view.endpoint.address, pin.num_tokens, pin.num_blocks, pin.seconds_left)

    async def _call(self, view: WorkerView, prefix: Prefix, seconds: float) -> wire.PinnedPrefix | None:
        adapter = _adapter_of(view, prefix)
        request = wire.PinPrefixRequest(
            token_ids=prefix.token_ids,
            scope=cache_scope(prefix.tenant, prefix.cache_salt, adapter),
            adapter=adapter_to_wire(adapter),
            ttl_seconds=seconds,
        )
        try:
            return (await self._fleet.admin(view.endpoint.address).PinPrefix(request, timeout=_PIN_SECONDS)).pin
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        except KeyError:
            return None  # the worker was removed

    async def _unplace(self, view: WorkerView, prefix: Prefix) -> WorkerPin:
        """End the pin of a prefix on a worker.

        Raises:
            KvferryError: the worker did not confirm.
        """
        address = view.endpoint.address
        placed = None if view.incarnation is None else self._placed.get(view.incarnation)
        if placed is not None:
            placed.names.pop(prefix.key, None)
        try:
            adapter = _adapter_of(view, prefix)
            request = wire.UnpinPrefixRequest(
                token_ids=prefix.token_ids, scope=cache_scope(prefix.tenant, prefix.cache_salt, adapter)
            )
            pin = (await self._fleet.admin(address).UnpinPrefix(request, timeout=_UNPIN_SECONDS)).pin
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        except (KeyError, UnknownModel):
            return WorkerPin(address, 0, 0, 0.0)  # the worker was removed, or the pin ended with its adapter
        return WorkerPin(address, pin.num_tokens, pin.num_blocks, pin.seconds_left)


def _adapter_of(view: WorkerView, prefix: Prefix) -> AdapterId | None:
    """Return the version of a prefix's adapter on a worker; `None` for the model itself.

    Raises:
        UnknownModel: the worker does not have the adapter.
    """
    if not prefix.model:
        return None
    for adapter in view.adapters:
        if adapter.name == prefix.model:
            return adapter
    raise UnknownModel(f"adapter {prefix.model!r} is not loaded on this worker", field="model")
