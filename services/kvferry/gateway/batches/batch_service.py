"""The files and batches of all tenants, for the HTTP API: what clients may ask for, within the limits of the settings.

All methods run on the event loop; work on the storage is done on threads.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import BinaryIO

from kvferry.core.clock import Clock
from kvferry.core.errors import Overloaded
from kvferry.gateway.batches.batch_errors import WrongState
from kvferry.gateway.batches.records import BatchRecord, FileRecord, Purpose, new_batch_id, new_file_id
from kvferry.gateway.batches.states import BATCH_MACHINE, BatchEvent, BatchState
from kvferry.gateway.batches.storage import BatchRecords, BatchStorage, UploadWriter
from kvferry.gateway.decide.config import BatchConfig

FILE_SECONDS = 30 * 24 * 3600
"""Time after its creation at which a file expires, if its client sets none."""
MAX_UPLOADS = 4
"""Maximum number of uploads of one tenant at a time."""


class BatchService:
    """Files and batches in one storage."""

    def __init__(self, storage: BatchStorage, config: BatchConfig, clock: Clock) -> None:
        """
        Args:
            storage: keeps files and batches.
            config: limits.
            clock: clock of creation and expiry.
        """
        self.storage, self.config = storage, config
        self.changed = asyncio.Event()
        """Set when a batch was created or cancelled here."""
        self._clock = clock
        self._uploading: dict[str, list[int]] = {}
        """Expected sizes of the files that are being received, by tenant."""

    # -- files -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def receiving(self, tenant: str, num_bytes: int) -> AsyncIterator[UploadWriter]:
        """Yield the file of an upload, which is deleted at the end of the `with` block unless `add_file` was called.

        Args:
            tenant: tenant of the caller.
            num_bytes: size of the request, if it is known; otherwise the largest allowed size.

        Raises:
            Overloaded: the tenant has no room for the file, or too many uploads.
            Unavailable: the storage cannot be used.
        """
        with self._reserved(tenant, num_bytes) as others:
            await self.storage.run(self._check_room, tenant, sum(others), len(others))
            upload = await self.storage.run(self.storage.new_upload, new_file_id())
            try:
                yield upload
            finally:
                await self.storage.run(upload.drop)

    @contextmanager
    def _reserved(self, tenant: str, num_bytes: int) -> Iterator[list[int]]:
        sizes = self._uploading.setdefault(tenant, [])
        if len(sizes) >= MAX_UPLOADS:
            raise Overloaded(
                f"{len(sizes)} files are being received, and at most {MAX_UPLOADS} are allowed at a time",
                retry_after_seconds=1.0,
            )
        sizes.append(num_bytes)
        try:
            yield sizes
        finally:
            sizes.remove(num_bytes)
            if not sizes:
                self._uploading.pop(tenant, None)

    def _check_room(self, tenant: str, num_bytes: int, num_files: int) -> None:
        config = self.config
        most = config.tenant_files - num_files + 1
        self.storage.records.check_room(tenant, num_bytes, max_files=most, max_bytes=config.tenant_file_bytes)

    async def add_file(
        self, tenant: str, upload: UploadWriter, purpose: Purpose, filename: str, seconds: int | None
    ) -> FileRecord:
        """Store a received file.

        Args:
            tenant: tenant of the caller.
            upload: the received file.
            purpose: what the file is for.
            filename: name that the client gave.
            seconds: time after which it expires; `None` for the default.

        Raises:
            Overloaded: the tenant has too many files, or too large ones.
            Unavailable: the storage cannot be used.
        """
        now, config = int(self._clock.wall()), self.config
        expires = now + (FILE_SECONDS if seconds is None else seconds)
        record = FileRecord(upload.file_id, tenant, purpose, filename, upload.num_bytes, now, expires)
        limits = {"max_files": config.tenant_files, "max_bytes": config.tenant_file_bytes}
        await asyncio.shield(self.storage.run(self.storage.add, upload, record, **limits))
        return record

    async def file(self, tenant: str, file_id: str, field: str = "file_id") -> FileRecord:
        """Return a file; see `BatchRecords.file`."""
        return await self.storage.run((await self._records()).file, tenant, file_id, self._clock.wall(), field)

    async def open_content(self, tenant: str, file_id: str) -> tuple[FileRecord, BinaryIO]:
        """Return a file and its content, which the caller closes on a thread; its reads block.

        Raises:
            NoSuchFile: the tenant has no such file.
            Unavailable: the storage cannot be used.
        """
        record = await self.file(tenant, file_id)
        return record, await self.storage.run(self.storage.open_content, record.id)

    async def files(
        self, tenant: str, *, limit: int, after: str | None, is_ascending: bool, purpose: str | None
    ) -> Sequence[FileRecord]:
        """Return files of a tenant; see `BatchRecords.files`."""
        listing, now = (await self._records()).files, self._clock.wall()
        return await self.storage.run(
            listing, tenant, now, limit=limit, after=after, is_ascending=is_ascending, purpose=purpose
        )

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file; see `BatchStorage.delete`."""
        await self.storage.run(self.storage.delete, tenant, file_id, self._clock.wall())

    # -- batches -----------------------------------------------------------------------------------------------

    async def create_batch(
        self,
        tenant: str,
        input_file_id: str,
        endpoint: str,
        metadata: Mapping[str, str] | None,
        output_seconds: int | None,
    ) -> BatchRecord:
        """Create a batch, which is checked and run later.

        Args:
            tenant: tenant of the caller.
            input_file_id: id of the file with its lines.
            endpoint: path that each line has.
            metadata: texts of the client.
            output_seconds: time after which the files of results expire; `None` for the default.

        Raises:
            NoSuchFile: the tenant has no such file.
            Overloaded: too many batches of the tenant are not over.
            Unavailable: the storage cannot be used.
        """
        await self.file(tenant, input_file_id, "input_file_id")
        record = BatchRecord(
            new_batch_id(),
            tenant,
            endpoint,
            input_file_id,
            BATCH_MACHINE.initial,
            int(self._clock.wall()),
            {},
            FILE_SECONDS if output_seconds is None else output_seconds,
            metadata,
        )
        await self.storage.run((await self._records()).add_batch, record)
        self.changed.set()
        return record

    async def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """Return a batch; see `BatchRecords.batch`."""
        return await self.storage.run((await self._records()).batch, tenant, batch_id)

    async def batches(self, tenant: str, *, limit: int, after: str | None) -> Sequence[BatchRecord]:
        """Return batches of a tenant; see `BatchRecords.batches`."""
        return await self.storage.run((await self._records()).batches, tenant, limit=limit, after=after)

    async def cancel_batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """Cancel a batch that is not over; its lines end soon after.

        Raises:
            NoSuchBatch: the tenant has no such batch.
            WrongState: the batch is over, or all its lines are computed.
        """
        found, now = await self.batch(tenant, batch_id), self._clock.wall()
        changed = await self.storage.run((await self._records()).change, found.id, BatchEvent.CANCEL, now)
        if changed is None:
            found = await self.batch(tenant, batch_id)
            if found.status in (BatchState.CANCELLING, BatchState.CANCELLED):
                return found
            raise WrongState(f"batch {batch_id!r} is {found.status.value} and cannot be cancelled", field="batch_id")
        self.changed.set()
        return changed

    def close(self) -> None:
        """Close the storage, and give its lock back."""
        self.storage.close()

    async def _records(self) -> BatchRecords:
        """Return the records; the first call opens or creates a folder."""
        return await self.storage.run(lambda: self.storage.records)
