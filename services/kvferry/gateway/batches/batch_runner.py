"""Runs the batches of a storage: starts and ends their runs, deletes expired files, and writes progress.

One gateway process at a time runs the batches of a storage, the one with its lock. The batches of a tenant run one
after another, in order of creation, so that tenants share the slots of lines equally.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from kvferry.core.errors import KvferryError
from kvferry.gateway.batches.batch_errors import LeaseLost, ResultsLost
from kvferry.gateway.batches.batch_run import BatchRun, RunParts
from kvferry.gateway.batches.records import BatchRecord
from kvferry.gateway.batches.states import BatchEvent, BatchState

_log = logging.getLogger(__name__)
POLL_SECONDS = 1.0
"""Interval at which batches of other processes, cancellations and expired batches are detected."""
_SWEEP_SECONDS = 3600.0
"""Interval of the deletion of expired files."""
_PAUSE_SECONDS = 10.0
"""Time after which a run that failed is repeated."""
MAX_RUNS = 8
"""Maximum number of batches that run at a time, each of another tenant."""
KEPT_SECONDS = 30 * 24 * 3600
"""Time after its creation for which a batch is kept."""


class BatchRunner:
    """The runs of a storage's batches. Used on the event loop's thread only."""

    def __init__(self, parts: RunParts, woken: asyncio.Event) -> None:
        """
        Args:
            parts: what all runs share.
            woken: set when a batch was created or cancelled in this process.
        """
        self._parts = parts
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._paused: dict[str, float] = {}
        """Times at which batches whose runs failed are run again, monotonic seconds."""
        self._written: dict[str, dict[str, int]] = {}
        """Counts that were written last, by batch."""
        self._next_sweep = 0.0
        self._lease = 0
        """Number of the lease under which batches run; 0 if another process runs them."""
        self._renewing = asyncio.Lock()
        self._woken = woken
        self._complaint = ""

    @property
    def num_runs(self) -> int:
        """Number of batches that run."""
        return len(self._runs)

    @property
    def has_lease(self) -> bool:
        """Whether this process runs the batches."""
        return bool(self._lease)

    def wake(self) -> None:
        """Look for changes now."""
        self._woken.set()

    async def run(self) -> None:
        """Run batches until cancelled; the rest of their lines is computed after the next start."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_lease(), name="batches' lease")
                group.create_task(self._keep_looking(), name="batches")
        finally:
            runs = dict(self._runs)
            await self._end_runs()
            self._runs = runs
            await self._write_progress()

    async def _keep_lease(self) -> None:
        """Renew the lease in time, however long a look takes."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if self._lease:
                with suppress(Exception):  # the next look tries again, and logs it
                    await self._renew()

    async def _keep_looking(self) -> None:
        while True:
            self._woken.clear()
            await self._look()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._woken.wait()

    async def _look(self) -> None:
        """Start and stop runs; log what prevents it, once."""
        storage = self._parts.storage
        try:
            if not await storage.run(lambda: storage.exists):
                return
            lease = await self._renew()
            if not lease:
                self._complain(f"another gateway process runs the batches of {storage.name}; this one only keeps them")
                return
            records = await storage.run(lambda: storage.records)
            await self._sweep()
            await self._write_progress()
            batches = await storage.run(records.open_batches)
            if lease == self._lease:
                self._follow(batches)
            self._complaint = ""
        except KvferryError as error:
            self._complain(f"the batches of {storage.name} cannot be run: {error.message}")
        except Exception as error:  # such as a folder that cannot be read for a while: the next look tries again
            self._complain(f"the batches of {storage.name} cannot be run: {error}", exc_info=True)

    async def _renew(self) -> int:
        """Take or renew the lease, and return its number; 0 if another process has it."""
        async with self._renewing:
            lease = await self._parts.storage.run(self._parts.storage.try_lock)
            if lease != self._lease:
                # What ran under another lease may not write any more.
                await self._end_runs()
                self._lease = lease
            return lease

    async def _end_runs(self) -> None:
        """Cancel all runs."""
        tasks = [task for _, task in self._runs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._runs.clear()
        self._written.clear()

    def _complain(self, text: str, *, exc_info: bool = False) -> None:
        if text != self._complaint:
            self._complaint = text
            _log.warning("%s", text, exc_info=exc_info)

    async def _sweep(self) -> None:
        now = self._parts.clock.monotonic()
        if now >= self._next_sweep:
            wall = self._parts.clock.wall()
            await self._parts.storage.run(self._parts.storage.sweep, wall)
            await self._parts.storage.run(self._parts.storage.records.drop_batches, wall - KEPT_SECONDS)
            self._next_sweep = now + _SWEEP_SECONDS

    async def _write_progress(self) -> None:
        """Write the counts of the running batches that have changed."""
        for batch_id, (run, _) in list(self._runs.items()):
            counts = run.counts()
            if counts and counts != self._written.get(batch_id):
                now = self._parts.clock.wall()
                with suppress(KvferryError):
                    await self._parts.storage.run(
                        self._parts.storage.records.change, batch_id, None, now, (), lease=self._lease, **counts
                    )
                    self._written[batch_id] = counts

    def _follow(self, batches: Sequence[BatchRecord]) -> None:
        """Stop the runs of batches that were cancelled or expired, and start those of further ones."""
        clock = self._parts.clock
        busy = {run.record.tenant for run, _ in self._runs.values()}
        for batch in batches:
            known = self._runs.get(batch.id)
            is_expired, is_cancelled = clock.wall() >= batch.expires_at, batch.status is BatchState.CANCELLING
            run = BatchRun(batch, self._parts, self._lease) if known is None else known[0]
            if is_cancelled or is_expired:
                run.stop(BatchEvent.CANCEL if is_cancelled else BatchEvent.EXPIRE)
            elif known is None and (batch.tenant in busy or len(self._runs) >= MAX_RUNS):
                continue
            if known is None and self._paused.get(batch.id, 0.0) <= clock.monotonic():
                busy.add(batch.tenant)
                task = asyncio.create_task(self._run(run), name="batch")
                self._runs[batch.id] = run, task

    async def _run(self, run: BatchRun) -> None:
        batch_id = run.record.id
        try:
            await run.run()
            self._paused.pop(batch_id, None)
        except asyncio.CancelledError:
            raise
        except (LeaseLost, ResultsLost) as error:
            # It begins again if it is still this gateway's.
            _log.warning("a run of batch %s has ended: %s", batch_id, error.message)
        except Exception as error:
            expected = isinstance(error, KvferryError | OSError)
            _log.error("batch %s is run again in %g s: %s", batch_id, _PAUSE_SECONDS, error, exc_info=not expected)
            self._paused[batch_id] = self._parts.clock.monotonic() + _PAUSE_SECONDS
        del self._runs[batch_id]
        self._written.pop(batch_id, None)
        self.wake()
