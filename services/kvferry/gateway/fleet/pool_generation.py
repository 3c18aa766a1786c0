"""Pauses generation on all workers of the fleet, and changes their weights in two phases.

The workers keep the state (`gateway.decide.generation_rule`); a worker that joins, or did not get a change, is sent the
pool's state in the background, and accepts no requests until it has it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import grpc

from kvferry.core.clock import Clock
from kvferry.core.errors import InvalidRequest, KvferryError, Unavailable
from kvferry.core.pausing import PauseMode, PauseState
from kvferry.gateway.decide.generation_rule import GenerationRule, PoolWeights
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.gateway.fleet.member import WorkerView, weights_of
from kvferry.rpc.errors import error_from_rpc
from kvferry.rpc.pause_wire import pause_from_wire, pause_mode_to_wire
from kvferry.v1 import worker_admin_pb2 as pb

_log = logging.getLogger(__name__)
_PREPARE_SECONDS = 900.0
_CALL_SECONDS = 10.0
"""Time that a call may take beyond the time for which the worker waits."""
_SEEN_SECONDS = 5.0
"""Time for the workers' next statuses to show a change."""
_LOOK_SECONDS = 0.5
_RETRY_SECONDS = 5.0
"""Time after which a worker that could not be brought up to date is tried again."""
_REPORT_SECONDS = 60.0
_CATCH_UP_SECONDS = 30.0
_STEADY_ROUNDS = 2
"""Rounds in which all workers are settled, with mode `wait`: in the first, a prompt may be on its way from one worker
to another that was asked before."""
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The results of a change on all workers."""

    failed: Mapping[str, KvferryError]
    """Errors by worker address."""
    unsettled: Sequence[str] = ()
    """Addresses of the workers on which something still runs."""


class PoolGeneration:
    """Changes the generation of a gateway's fleet. `run` is a background task."""

    def __init__(self, fleet: Fleet, clock: Clock, forget: Callable[[], None]) -> None:
        """
        Args:
            fleet: the workers.
            clock: clock of the states.
            forget: drops the gateway's own references to cached KV.
        """
        self._fleet = fleet
        self._clock = clock
        self._forget = forget
        self._turn = asyncio.Lock()
        self._tried: dict[str, float] = {}
        self._reported = float("-inf")

    @property
    def rule(self) -> GenerationRule:
        """The pool's state."""
        return self._fleet.rule

    async def pause(self, mode: PauseMode, by: str, timeout_seconds: float) -> None:
        """Pause generation on all workers, and wait until nothing runs that the mode does not let run. Idempotent.

        Args:
            mode: what happens to running requests.
            by: who pauses.
            timeout_seconds: maximum time to wait.

        Raises:
            Unavailable: a worker was not reached, or something still runs; the pause stays in effect.
        """
        async with self._turn:
            _check(await self._set(mode, by, timeout_seconds), timeout_seconds)

    async def resume(self, by: str) -> None:
        """Resume generation on all workers. Idempotent.

        Raises:
            Unavailable: a worker was not reached; it resumes as soon as it is.
        """
        async with self._turn:
            _check(await self._set(None, by, 0.0), 0.0)

    async def update(self, path: str, version: str, mode: PauseMode, by: str, timeout_seconds: float) -> PoolWeights:
        """Change the weights of all workers: all read the checkpoint, then all use it. Generation is paused for the
        second part, unless it already is.

        Args:
            path: path of the checkpoint below the workers' weights folders.
            version: version of the weights; empty for the first digits of their digest.
            mode: mode of the pause, if generation is not paused.
            by: who changes the weights.
            timeout_seconds: maximum time for running requests to end or stop.

        Raises:
            KvferryError: a worker cannot use the checkpoint, or requests did not stop in time: no worker changed its
                weights. `Unavailable` with reason UPDATE_INCOMPLETE: some did; the others accept no requests until they
                have.
        """
        async with self._turn:
            views = [view for view in self._fleet.views() if view.incarnation is not None]
            if not views:
                raise Unavailable("there are no workers; start one, then retry", retry_after_seconds=1.0)
            revision = max(self.rule.weights.revision + 1, int(1000 * self._clock.wall()))
            request = pb.PrepareWeightsRequest(revision=revision, path=path, version=version)
            try:
                weights = await self._prepared(views, request)
                was_running = self.rule.pause.mode is None
                try:
                    if was_running:
                        _check(await self._set(mode, by, timeout_seconds), timeout_seconds)
                    await self._commit(views, weights, timeout_seconds)
                finally:
                    if was_running:
                        await self._set(None, by, 0.0)
            except BaseException:
                await self._on_all(views, lambda view: self._discard(view, revision))
                raise
            await self._seen(revision)
            return weights

    async def run(self) -> None:
        """Send the pool's state to workers that are behind, and report a pause, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._fleet.next_change()
            await self.look()

    async def look(self) -> None:
        """Bring workers up to date that are behind, and log a pause once a minute."""
        now = self._clock.monotonic()
        if (note := self.rule.note(self._clock.wall())) and now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            _log.warning("%s", note)
        for view in self._fleet.views():
            if view.incarnation is None or self._turn.locked() or not self.rule.refusal(view.incarnation):
                continue
            if now - self._tried.get(view.incarnation, float("-inf")) < _RETRY_SECONDS:
                continue
            self._tried = {view.incarnation: now} | dict(list(self._tried.items())[:256])
            async with self._turn:
                await self._bring_up(view)

    async def _bring_up(self, view: WorkerView) -> None:
        address, weights = view.endpoint.address, self.rule.weights
        try:
            await self._send(view, state=self.rule.pause, wait_seconds=0.0)
            if self.rule.of(view.incarnation or "")[1].revision < weights.revision and weights.path:
                request = pb.PrepareWeightsRequest(
                    revision=weights.revision, path=weights.path, version=weights.version
                )
                if (await self._prepare(view, request)).digest != weights.digest:
                    raise InvalidRequest(f"the checkpoint {weights.path!r} has changed since the pool's update")
                await self._use(view, weights.revision, _CATCH_UP_SECONDS, pauses=True)
        except (grpc.aio.AioRpcError, KvferryError, KeyError) as error:
            _log.warning("worker %s cannot be brought up to date: %s", address, _error(error).message)
        else:
            _log.info("worker %s has the pool's state of generation", address)

    # ------------------------------------------------------------------ pauses

    async def _set(self, mode: PauseMode | None, by: str, timeout_seconds: float) -> Outcomes:
        rule = self.rule
        state = rule.pause.next(mode, by, self._clock.wall())
        deadline = self._clock.monotonic() + timeout_seconds
        rule.is_changing = True
        try:
            rounds, needed = 0, _STEADY_ROUNDS if mode is PauseMode.WAIT else 1
            while True:
                views = [view for view in self._fleet.views() if view.incarnation is not None]
                left = max(0.0, deadline - self._clock.monotonic())
                found, failed = await self._on_all(views, partial(self._send, state=state, wait_seconds=left))
                unsettled = [address for address, one in found.items() if mode is not None and not one.settled]
                rounds = 0 if unsettled else rounds + 1
                if failed or rounds >= needed or (unsettled and not left):
                    return Outcomes(failed, unsettled)
        finally:
            rule.is_changing = False
            rule.pause = max(rule.pause, state, key=lambda one: one.revision)
            self._reported = self._clock.monotonic()

    async def _send(self, view: WorkerView, *, state: PauseState, wait_seconds: float) -> pb.PauseStatus:
        request = pb.SetPauseRequest(
            revision=state.revision,
            mode=pause_mode_to_wire(state.mode),
            by=state.by,
            since=state.since,
            timeout_seconds=wait_seconds,
        )
        stub = self._fleet.admin(view.endpoint.address)
        answer: pb.PauseStatus = await stub.SetPause(request, timeout=wait_seconds + _CALL_SECONDS)
        self.rule.saw(view.incarnation or "", pause_from_wire(answer), PoolWeights())
        return answer

    # ------------------------------------------------------------------ weights

    async def _prepared(self, views: Sequence[WorkerView], request: pb.PrepareWeightsRequest) -> PoolWeights:
        found, failed = await self._on_all(views, lambda view: self._prepare(view, request))
        if failed:
            address, error = next(iter(failed.items()))
            error.message = (
                f"{len(failed)} of {len(views)} workers cannot use these weights, {address}: {error.message}; no "
                "worker changed its weights"
            )
            raise error
        digests = {one.digest for one in found.values()}
        if len(digests) != 1:
            raise InvalidRequest(
                f"path names {len(digests)} different checkpoints on the workers; give all of them the same files. No "
                "worker changed its weights",
                field="path",
                reason="WEIGHTS_DIFFER",
            )
        version = next(iter(found.values())).version
        return PoolWeights(request.revision, version, digests.pop(), request.path)

    async def _commit(self, views: Sequence[WorkerView], weights: PoolWeights, timeout_seconds: float) -> None:
        self.rule.is_changing = True
        try:
            found, failed = await self._on_all(
                views, lambda view: self._use(view, weights.revision, timeout_seconds, pauses=False)
            )
        finally:
            self.rule.is_changing = False
        self._forget()
        if found:
            self.rule.weights = weights
        if failed:
            address, error = next(iter(failed.items()))
            if not found:
                error.message = f"no worker changed its weights, {address}: {error.message}"
                raise error
            raise Unavailable(
                f"{len(failed)} of {len(views)} workers did not change their weights, {address}: {error.message}; they "
                "accept no requests until they have them",
                reason="UPDATE_INCOMPLETE",
            )

    async def _seen(self, revision: int) -> None:
        """Wait for the workers' statuses with the new weights, whose KV has another fingerprint."""
        self._fleet.poll_now()
        with suppress(TimeoutError):
            async with asyncio.timeout(_SEEN_SECONDS):
                await self._fleet.wait_until(
                    lambda fleet: all(view.weights.revision == revision for view in fleet.views() if view.takes_work)
                )

    async def _prepare(self, view: WorkerView, request: pb.PrepareWeightsRequest) -> pb.PrepareWeightsResponse:
        stub = self._fleet.admin(view.endpoint.address)
        answer: pb.PrepareWeightsResponse = await stub.PrepareWeights(request, timeout=_PREPARE_SECONDS)
        return answer

    async def _use(self, view: WorkerView, revision: int, wait_seconds: float, *, pauses: bool) -> pb.WeightsStatus:
        request = pb.CommitWeightsRequest(revision=revision, timeout_seconds=wait_seconds, pauses=pauses)
        stub = self._fleet.admin(view.endpoint.address)
        answer: pb.WeightsStatus = await stub.CommitWeights(request, timeout=wait_seconds + _CALL_SECONDS)
        self.rule.saw(view.incarnation or "", PauseState(), weights_of(answer))
        return answer

    async def _discard(self, view: WorkerView, revision: int) -> None:
        stub = self._fleet.admin(view.endpoint.address)
        await stub.DiscardWeights(pb.DiscardWeightsRequest(revision=revision), timeout=_CALL_SECONDS)

    async def _on_all(
        self, views: Sequence[WorkerView], call: Callable[[WorkerView], Awaitable[R]]
    ) -> tuple[dict[str, R], dict[str, KvferryError]]:
        """Return the answers and the errors of a call to several workers, by address."""
        results = await asyncio.gather(*map(call, views), return_exceptions=True)
        found: dict[str, R] = {}
        failed: dict[str, KvferryError] = {}
        for view, result in zip(views, results, strict=True):
            if isinstance(result, KeyError):
                continue  # the worker was removed meanwhile
            if isinstance(result, grpc.aio.AioRpcError | KvferryError):
                failed[view.endpoint.address] = _error(result)
            elif isinstance(result, BaseException):
                raise result
            else:
                found[view.endpoint.address] = result
        return found, failed


def _error(error: BaseException) -> KvferryError:
    if isinstance(error, grpc.aio.AioRpcError):
        return error_from_rpc(error)
    return error if isinstance(error, KvferryError) else Unavailable("the worker was removed")


def _check(outcomes: Outcomes, timeout_seconds: float) -> None:
    """Raise the error of a change of the pause that did not reach all workers, or is not settled.

    Raises:
        Unavailable: with reason PAUSE_INCOMPLETE or PAUSE_NOT_SETTLED.
    """
    if outcomes.failed:
        address, error = next(iter(outcomes.failed.items()))
        raise Unavailable(
            f"{len(outcomes.failed)} workers were not reached, {address}: {error.message}; the change is in effect on "
            "the others, and is sent to these when they answer",
            reason="PAUSE_INCOMPLETE",
        )
    if outcomes.unsettled:
        raise Unavailable(
            f"requests still run after {timeout_seconds:g} s on {', '.join(outcomes.unsettled[:8])}; the pause stays "
            "in effect: wait longer, use mode keep or abort, or resume",
            reason="PAUSE_NOT_SETTLED",
        )
