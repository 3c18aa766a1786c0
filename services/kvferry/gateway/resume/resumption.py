"""Continues the streams of clients that reconnect, and records all streams of a gateway so that others can."""

from array import array
from dataclasses import dataclass, replace

from blake3 import blake3

from kvferry.core.clock import Clock
from kvferry.core.errors import InvalidRequest, ResumeRefused
from kvferry.core.ids import RequestId
from kvferry.gateway.observe.instruments import GatewayInstruments
from kvferry.gateway.resume.event_ids import EventId, EventIds, created_of, new_stream_id
from kvferry.gateway.resume.recorded_source import RecordedSource
from kvferry.gateway.resume.stream_records import StreamRecord, StreamRecords
from kvferry.gateway.resume.token_batches import RecordedTokens, StreamHeader, batches_of, header_of, joined
from kvferry.gateway.state.pool_seal import PoolSeal
from kvferry.gateway.state.state_client import StoreUnavailable
from kvferry.serving.request import Request
from kvferry.serving.text_service import TextService

_GRACE_SECONDS = 60.0
"""Time for which a record outlasts the longest request."""


@dataclass(frozen=True, slots=True)
class OpenedStream:
    """A stream that is about to begin or to continue."""

    service: TextService
    """Service whose source yields the recorded tokens first, and records further ones."""
    request: Request
    """The request, with the id of the first one."""
    ids: EventIds
    """Ids of its events."""
    record: StreamRecord
    created: int
    """Unix time of the answer, seconds."""


@dataclass(frozen=True, slots=True)
class StreamAttempt:
    """A request that may be streamed: the position of its client, and the seed if it has none."""

    stream_id: str
    tenant: str
    after: EventId | None
    """Id of the last event that the client has; `None` for a new stream."""
    body: bytes
    """Digest of path and body."""
    seed: int

    def drawing(self, service: TextService) -> TextService:
        """Return a service that gives a request without a seed that of the stream."""
        return replace(service, new_seed=lambda: self.seed)


class StreamResumption:
    """The streams of one gateway that outlive it. Used on the event loop's thread only."""

    def __init__(
        self,
        records: StreamRecords,
        seal: PoolSeal,
        clock: Clock,
        instruments: GatewayInstruments,
        request_timeout_seconds: float,
    ) -> None:
        """
        Args:
            records: records of the pool's streams.
            seal: derives keys, seeds and seals.
            clock: wall clock of answers.
            instruments: metrics.
            request_timeout_seconds: longest time of a request; its record lives longer.
        """
        self.records = records
        self._seal = seal
        self._clock = clock
        self._instruments = instruments
        self._running_seconds = request_timeout_seconds + _GRACE_SECONDS

    def begin(self, tenant: str, path: str, body: bytes, last_event_id: str | None) -> StreamAttempt:
        """Begin a request whose answer may be a stream.

        Args:
            tenant: tenant of the client.
            path: path of the request.
            body: body of the request.
            last_event_id: value of the header `Last-Event-ID`; `None` or empty for a new stream.

        Raises:
            InvalidRequest: the header has no id of an event.
        """
        after = EventId.parse(last_event_id) if last_event_id else None
        stream_id = new_stream_id(self._clock.wall()) if after is None else after.stream_id
        digest = blake3(path.encode() + b"\0").update(body).digest()
        return StreamAttempt(stream_id, tenant, after, digest, self._seal.seed(tenant, stream_id))

    async def open(self, attempt: StreamAttempt, service: TextService, request: Request) -> OpenedStream:
        """Open a stream, or continue the one of which the client has a part.

        Args:
            attempt: the attempt.
            service: the service of the request.
            request: the prepared request.

        Raises:
            ResumeRefused: the client has a part of another answer.
        """
        digest = _digest(attempt.body, request)
        member = self._seal.member(attempt.tenant, attempt.stream_id)
        seal = self._seal.seal(member)
        adapter = request.caller.adapter
        header = StreamHeader(
            request.caller.request_id,
            digest,
            service.model.digest,
            "" if adapter is None else f"{adapter.name}@{adapter.digest.hex()}",
        )
        prior, epoch, is_recorded = RecordedTokens(), 0, True
        try:
            if attempt.after is not None:
                fields = await self._claim(member)
                epoch = int(fields.get(b"e", b"0"))
                is_recorded = epoch > 0
                found = header_of(seal, fields)
                if found is not None:
                    _check_same(found, header)
                    header = found
                    request = replace(request, caller=replace(request.caller, request_id=RequestId(found.request_id)))
                    prior = joined(batches_of(seal, fields))
            ids = EventIds(attempt.stream_id, digest, attempt.after)
        except ResumeRefused:
            self._instruments.reconnections.labels("refused").inc()
            raise
        record = StreamRecord(
            self.records,
            member,
            seal,
            header,
            epoch=epoch,
            num_written=len(prior.tokens),
            running_seconds=self._running_seconds,
        )
        if not is_recorded:
            record.give_up("unreachable")
        is_whole = prior.is_ended or prior.finish_reason is not None
        if attempt.after is not None:
            outcome = "replayed" if is_whole else "continued" if prior.tokens else "recomputed"
            self._instruments.reconnections.labels(outcome).inc()
        if is_whole:  # nothing is computed
            service.count(attempt.tenant)
            service = replace(service, admission=None)
        source = RecordedSource(service.source, record, prior, attempt.after)
        return OpenedStream(replace(service, source=source), request, ids, record, created_of(attempt.stream_id))

    async def _claim(self, member: bytes) -> dict[bytes, bytes]:
        """Return the fields of a record, which now belongs to this gateway; empty if there can be none."""
        try:
            return await self.records.store.claim(member, self._running_seconds) or {}
        except StoreUnavailable as error:
            self.records.unreachable(error)
            return {}


def refuse_position(last_event_id: str | None, why: str) -> None:
    """Refuse a client's position in a stream that cannot be continued: without the header it would get an answer from
    the beginning, and add it to what it has.

    Raises:
        InvalidRequest: the client has a part of the answer.
    """
    if last_event_id:
        raise InvalidRequest(
            f"Last-Event-ID is set, but {why}; begin a new stream without Last-Event-ID", field="Last-Event-ID"
        )


def _digest(body: bytes, request: Request) -> bytes:
    """Return the digest of a body and the prompt that was made of it: a template may write the date."""
    return blake3(body).update(array("I", request.token_ids).tobytes()).digest()


def _check_same(found: StreamHeader, header: StreamHeader) -> None:
    for what, one, other in (
        ("the body or its prompt", found.digest, header.digest),
        ("the model", found.model, header.model),
        ("the adapter", found.adapter, header.adapter),
    ):
        if one != other:
            raise ResumeRefused(
                f"{what} of the request differs from that of the stream in Last-Event-ID; send the first body "
                "unchanged, or begin a new stream without Last-Event-ID",
                field="Last-Event-ID",
            )
