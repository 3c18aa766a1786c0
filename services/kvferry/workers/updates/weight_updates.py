"""Changes the weights of a worker in two phases: a checkpoint is read and checked beside the weights in use (prepare),
and used from the next step on (commit). A failure of either leaves the weights in use.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from kvferry.core.errors import InvalidRequest, ModelFileError, Unavailable, UsageError
from kvferry.core.pausing import MAX_VERSION_CHARS
from kvferry.core.process.memory import free_memory
from kvferry.engine.build import LoadedModel
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.new_weights import LoadedWeights, check_changeable, load_weights
from kvferry.engine.schedule.messages import NewWeights
from kvferry.kv.pages.layout import KvLayout
from kvferry.v1 import worker_admin_pb2
from kvferry.workers.adapters.adapter_loader import AdapterLoader
from kvferry.workers.allowed_path import AllowedFolder
from kvferry.workers.calls.context import WorkerContext
from kvferry.workers.updates.pause_keeper import PauseKeeper, check_timeout

_log = logging.getLogger(__name__)
_PREPARED_SECONDS = 900.0
"""Time for which prepared weights are kept in memory without a commit."""
_VERSION_DIGITS = 12
"""Digits of the digest that are the version of weights without a name."""


def default_version(digest: str) -> str:
    """Return the version of weights that were given none."""
    return digest[:_VERSION_DIGITS]


def check_version(version: str) -> None:
    """Check a weight version.

    Raises:
        InvalidRequest: it is too long or not printable.
    """
    if len(version) > MAX_VERSION_CHARS or not version.isprintable():
        raise InvalidRequest(f"version must have at most {MAX_VERSION_CHARS} printable characters", field="version")


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """A checkpoint in memory, ready to be used."""

    weights: LoadedWeights
    status: worker_admin_pb2.WeightsStatus
    """The worker's status after the commit."""
    expiry: asyncio.TimerHandle


class WeightUpdates:
    """The weights of one engine. Used on the event loop's thread; checkpoints are read on another thread, one at a
    time."""

    def __init__(
        self,
        model: LoadedModel,
        runner: Runner,
        context: WorkerContext,
        folder: str,
        pauses: PauseKeeper,
        adapters: AdapterLoader,
        *,
        use_layout: Callable[[KvLayout], None],
        version: str,
        is_shared: bool = False,
    ) -> None:
        """
        Args:
            model: the model in use.
            runner: computes with it.
            context: state of the worker.
            folder: folder below which callers may name checkpoints; empty refuses all.
            pauses: the pause of the engine.
            adapters: loads adapters, which are packed for the model in use.
            use_layout: called on the engine's thread with the layout of the new KV.
            version: version of the weights in use.
            is_shared: whether several engines of this process compute with the model.
        """
        self._model = model
        self._runner = runner
        self._context = context
        self._pauses = pauses
        self._adapters = adapters
        self._use_layout = use_layout
        self._is_shared = is_shared
        self._allowed = AllowedFolder(
            folder,
            "path",
            "a checkpoint",
            "weights folder",
            "this worker does not change its weights at run time; start it with --weights-folder",
        )
        self._turn = asyncio.Lock()
        self._prepared: _Prepared | None = None
        self.status = worker_admin_pb2.WeightsStatus(version=version, digest=model.files_digest)
        """The weights in use."""

    async def prepare(self, request: worker_admin_pb2.PrepareWeightsRequest) -> worker_admin_pb2.PrepareWeightsResponse:
        """Read and check a checkpoint. Nothing in use changes; weights prepared earlier are freed.

        Raises:
            InvalidRequest: the checkpoint is missing, damaged, too large or of another model, or this worker's weights
                cannot be changed.
            Forbidden: the path is not below the configured folder, or none is configured.
        """
        if not request.revision:
            raise InvalidRequest("revision must be above 0", field="revision")
        check_version(request.version)
        begun = self._context.clock.monotonic()
        path = self._allowed.resolved(request.path)
        self._check_changeable()
        async with self._turn:
            self._drop()
            try:
                weights = await asyncio.to_thread(load_weights, self._model, path)
            except (ModelFileError, UsageError) as error:
                raise InvalidRequest(error.message, field="path", reason="WEIGHTS_INVALID") from error
            status = worker_admin_pb2.WeightsStatus(
                version=request.version or default_version(weights.digest),
                revision=request.revision,
                digest=weights.digest,
                path=request.path,
            )
            expiry = asyncio.get_running_loop().call_later(_PREPARED_SECONDS, self._expire, request.revision)
            self._prepared = _Prepared(weights, status, expiry)
        seconds = self._context.clock.monotonic() - begun
        _log.info("weights %s are prepared from %s in %.2f s", status.version, path.name, seconds)
        return worker_admin_pb2.PrepareWeightsResponse(version=status.version, digest=status.digest, seconds=seconds)

    async def commit(self, request: worker_admin_pb2.CommitWeightsRequest) -> worker_admin_pb2.WeightsStatus:
        """Use the prepared weights from the next step on. Idempotent.

        Raises:
            InvalidRequest: the weights of this revision are not prepared, or adapters are loaded.
            Unavailable: generation is not paused, or the pause does not settle in time; the weights stay prepared.
        """
        check_timeout(request.timeout_seconds)
        if request.revision and request.revision == self.status.revision:
            return self.status
        async with self._turn, self._adapters.turn:
            prepared = self._prepared
            if prepared is None or prepared.status.revision != request.revision:
                raise InvalidRequest(
                    f"no weights are prepared for revision {request.revision}; prepare them, then commit",
                    field="revision",
                    reason="WEIGHTS_NOT_PREPARED",
                )
            async with self._pauses.stopped() if request.pauses else nullcontext():
                if not await self._pauses.settled(request.timeout_seconds, is_stopped=request.pauses):
                    raise Unavailable(
                        "generation is not paused, or did not stop in time; pause, then commit again",
                        reason="NOT_PAUSED",
                        retry_after_seconds=1.0,
                    )
                await self._change(prepared)
            self._drop()
        await asyncio.to_thread(free_memory)
        return self.status

    def discard(self, revision: int) -> None:
        """Free the weights that are prepared for a revision. Idempotent."""
        if self._prepared is not None and self._prepared.status.revision == revision:
            self._drop()

    async def _change(self, prepared: _Prepared) -> None:
        model, runner, weights = self._model, self._runner, prepared.weights
        layout = model.layout_with(weights.digest)

        def install() -> None:
            model.take_weights(weights.model, weights.digest)
            runner.use(weights.model)
            self._use_layout(layout)

        change = NewWeights(prepared.status.version, layout.fingerprint, install)
        count = await self._context.loop.change_weights(change)
        self.status = prepared.status
        _log.info("weights %s are in use; %d requests continue with them", prepared.status.version, count)

    def _check_changeable(self) -> None:
        """Check that this worker's weights can be changed.

        Raises:
            InvalidRequest: they cannot.
        """
        check_changeable(self._model, self._runner)
        if self._is_shared:
            raise InvalidRequest(
                "the weights of role split cannot be changed, because its two engines share them; start the roles as "
                "separate workers",
                reason="WEIGHTS_NOT_SUPPORTED",
            )
        if self._context.loop.adapters:
            raise InvalidRequest(
                "the weights cannot be changed while adapters are loaded; unload the adapters, then retry",
                reason="WEIGHTS_NOT_SUPPORTED",
            )

    def _expire(self, revision: int) -> None:
        _log.warning("prepared weights were freed: no commit came within %.0f s", _PREPARED_SECONDS)
        self.discard(revision)

    def _drop(self) -> None:
        if self._prepared is not None:
            self._prepared.expiry.cancel()
            self._prepared = None
