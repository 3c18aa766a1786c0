"""Writes the records of one gateway's streams behind the streams, which never wait for it.

    stream ── add(tokens) ──► StreamRecord: tokens that are not written yet
                                   │  is due: 1/32 more tokens than are written, or the end
    writer task, one script call at a time ──► StreamStore

A stream that cannot be recorded goes on without a record; a client that comes back then waits for its recomputation.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from kvferry.core.clock import Clock
from kvferry.core.rare_lines import RareLines, more
from kvferry.core.sampling import FinishReason, SampledToken
from kvferry.gateway.observe.instruments import GatewayInstruments
from kvferry.gateway.resume.stream_store import RecordWrite, StreamStore, WriteResult
from kvferry.gateway.resume.token_batches import HEADER_FIELD, StreamHeader, TokenBatch
from kvferry.gateway.state.pool_seal import ValueSeal
from kvferry.gateway.state.state_client import StoreUnavailable
from kvferry.serving.token_source import TokenEvent

_log = logging.getLogger(__name__)
_INTERVAL_SECONDS = 0.1
"""Shortest pause between two writes of a gateway."""
_PAUSE_FACTOR = 200
"""The pause after a write is at least so many times the time that its records took to seal, so that a gateway with many
streams spends its time on the streams: about 0.7 s after 256 records."""
_DRAIN_PAUSE_SECONDS = 0.01
_RETRY_SECONDS = 1.0
"""Time between a failed write and the next one."""
_MAX_RECORDS_PER_WRITE = 256
_MAX_DUE = 8192
"""Number of records that wait for a write at most; further ones are given up."""
_DUE_SHARE = 32
"""A record is written when it has 1/32 more tokens: so much of an answer is computed again at most, and the number of
writes grows with the logarithm of its length."""
_MAX_PENDING_TOKENS = 4096
_MAX_RECORD_BYTES = 4 << 20
"""Bounds of one record: tokens that wait for Redis, and bytes in Redis."""
RETURN_SECONDS = 120.0
"""Time to live of a record after its client has left, or has got the whole answer."""


class StreamRecord:
    """The record of one stream, from its gateway's side."""

    def __init__(
        self,
        records: "StreamRecords",
        member: bytes,
        seal: ValueSeal,
        header: StreamHeader,
        *,
        epoch: int = 0,
        num_written: int = 0,
        running_seconds: float,
    ) -> None:
        """
        Args:
            records: writes the record.
            member: name of the record.
            seal: seals its values.
            header: its header, which is written with the first tokens.
            epoch: epoch of this gateway, 0 for a new stream.
            num_written: number of tokens that the record has.
            running_seconds: time to live while the stream runs.
        """
        self.member = member
        self.epoch = epoch
        self.is_fenced = False
        """Whether another gateway continues the stream, so that this one must end it."""
        self._records = records
        self._seal = seal
        self._header: StreamHeader | None = header
        self._num_written = num_written
        self._pending: list[SampledToken] = []
        self._finish: FinishReason | None = None
        self._usage = (0, 0)
        self._num_bytes = 0
        self._ttl_seconds = running_seconds
        self._is_given_up = False
        self._has_left = False
        self._is_ended = False
        self._has_news = False

    def add(self, event: TokenEvent) -> None:
        """Add tokens that were generated."""
        if self._is_given_up:
            return
        pending = self._pending
        if not pending and not self._num_written:
            self._usage = event.num_cached_tokens, event.num_written_tokens
        pending += event.tokens
        self._finish = event.finish_reason
        if self._has_news:
            if len(pending) > _MAX_PENDING_TOKENS:
                self.give_up("slow")
        elif self._finish is not None or len(pending) * _DUE_SHARE >= self._num_written:
            self._is_due()

    def end(self) -> None:
        """Note that the client was sent the whole answer."""
        self._is_ended = True
        self.leave()

    def leave(self) -> None:
        """Note that the stream has ended at this gateway, whether the client has got the whole answer or not; the
        record is kept for the time in which the client may come back."""
        if self._has_left:
            return
        self._has_left, self._ttl_seconds = True, RETURN_SECONDS
        if not self._is_given_up:
            self._is_due()

    def give_up(self, reason: str) -> None:
        """Go on without a record.

        Args:
            reason: label of the metric.
        """
        if not self._is_given_up:
            self._is_given_up = True
            self._pending.clear()
            self._records.failed(reason)

    def next_write(self) -> "tuple[RecordWrite, int] | None":
        """Return what is to be written now, and its number of tokens; `None` if there is nothing."""
        self._has_news = False
        if self._is_given_up:
            return None
        batch = TokenBatch.of(
            self._pending,
            self._finish,
            num_cached=self._usage[0],
            num_written=self._usage[1],
            is_ended=self._is_ended,
        )
        name = str(self._num_written).encode()
        fields = {name: self._seal.sealed(name, batch)}
        if self._header is not None:
            fields[HEADER_FIELD] = self._seal.sealed(HEADER_FIELD, self._header)
        write = RecordWrite(self.member, self.epoch, self._ttl_seconds, fields)
        if self._num_bytes + write.num_bytes > _MAX_RECORD_BYTES:
            self.give_up("too_large")
            return None
        return write, len(self._pending)

    def written(self, result: WriteResult, write: RecordWrite, num_tokens: int) -> None:
        """Note the result of a write of `num_tokens` tokens."""
        if result is WriteResult.FENCED:
            self.is_fenced = True
            self.give_up("fenced")
        elif result is WriteResult.FULL:
            self.give_up("full")
        else:
            self._header = None
            self._num_written += num_tokens
            self._num_bytes += write.num_bytes
            del self._pending[:num_tokens]

    def retry(self) -> None:
        """Note that a write may have failed; it is repeated, and overwrites what was written. The record of a stream
        that has ended is given up."""
        if self._has_left:
            self.give_up("unreachable")
        elif not self._is_given_up:
            self._is_due()

    def _is_due(self) -> None:
        if not self._has_news:
            self._has_news = True
            self._records.due(self)


class StreamRecords:
    """The records of one gateway's streams, and the task that writes them."""

    def __init__(self, store: StreamStore, clock: Clock, instruments: GatewayInstruments) -> None:
        """
        Args:
            store: the pool's records.
            clock: time of writes and log lines.
            instruments: metrics.
        """
        self.store = store
        self._instruments = instruments
        self._clock = clock
        self._lines = RareLines(clock)
        self._due: list[StreamRecord] = []
        self._has_due, self._is_draining = asyncio.Event(), asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def due(self, record: StreamRecord) -> None:
        """Write a record with the next call."""
        if len(self._due) >= _MAX_DUE:
            record.give_up("slow")
            return
        self._due.append(record)
        self._has_due.set()
        self._is_idle.clear()

    def failed(self, reason: str) -> None:
        """Count a stream that goes on without a record."""
        self._instruments.stream_record_failures.labels(reason).inc()
        if (left_out := self._lines.left_out(reason)) is not None:
            _log.warning("a stream has no record (%s)%s", reason, more(left_out))

    def unreachable(self, error: StoreUnavailable) -> None:
        """Note that Redis did not answer."""
        self._instruments.stream_record_failures.labels("unreachable").inc()
        if (left_out := self._lines.left_out("unreachable")) is not None:
            _log.warning("streams are not recorded: %s%s", error.message, more(left_out))

    async def run(self) -> None:
        """Write what is due, until cancelled."""
        while True:
            await self._has_due.wait()
            pause = await self._write_once()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._is_draining.wait()
                    await asyncio.sleep(min(pause, _DRAIN_PAUSE_SECONDS))

    async def drain(self, seconds: float) -> None:
        """Write everything without pauses, in at most `seconds` seconds."""
        self._is_draining.set()
        try:
            async with asyncio.timeout(seconds):
                await self._is_idle.wait()
        except TimeoutError:
            _log.warning("%d records of streams were not written: Redis did not answer in time", len(self._due))
        finally:
            self._is_draining.clear()

    async def _write_once(self) -> float:
        """Write some records; return the time until the next write in seconds."""
        begun = self._clock.monotonic()
        taken = self._due[:_MAX_RECORDS_PER_WRITE]
        del self._due[:_MAX_RECORDS_PER_WRITE]
        if not self._due:
            self._has_due.clear()
        made = [(record, found) for record in taken if (found := record.next_write()) is not None]
        pause = max(_INTERVAL_SECONDS, _PAUSE_FACTOR * (self._clock.monotonic() - begun))
        if made:
            writes = [write for _, (write, _) in made]
            try:
                self._note(made, await self.store.write(writes))
            except StoreUnavailable as error:
                self.unreachable(error)
                pause = _RETRY_SECONDS
                for record, _ in made:
                    record.retry()
        if not self._due:
            self._is_idle.set()
        return pause

    def _note(
        self, made: Sequence[tuple[StreamRecord, tuple[RecordWrite, int]]], results: Sequence[WriteResult]
    ) -> None:
        for (record, (write, num_tokens)), result in zip(made, results, strict=True):
            record.written(result, write, num_tokens)
            if result is WriteResult.OK:
                self._instruments.stream_record_bytes.inc(write.num_bytes)
