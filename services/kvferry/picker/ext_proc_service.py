"""The external processing service: one stream per HTTP request, each with its own exchange."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field

from kvferry.gateway.decide.flow.fair_queue import QueueEntry
from kvferry.picker.config import PickerConfig
from kvferry.picker.decide.choice import Picked
from kvferry.picker.decide.exchange import (
    Answered,
    Ask,
    Complete,
    Exchange,
    Outgoing,
    ProxyReply,
    Refuse,
    RequestHead,
)
from kvferry.picker.envoy_messages import incoming, refusal, reply
from kvferry.picker.picker_metrics import PickerMetrics
from kvferry.picker.pool_picker import PoolPicker
from kvferry.v1 import ext_proc_pb2 as pb
from kvferry.v1.ext_proc_pb2_grpc import ExternalProcessorServicer

_MAX_HELD_BYTES = 256 << 20
"""Bytes of all bodies that are held; beyond it, requests are routed without the rest of their bodies."""


@dataclass(slots=True)
class _Stream:
    """The state of one stream that is not the exchange's."""

    exchange: Exchange
    headers: Mapping[str, str] = field(default_factory=dict)
    subset: tuple[str, ...] | None = None
    picked: Picked | None = None
    entry: QueueEntry | None = None
    num_counted: int = 0
    """Bytes of the body that count in `num_held_bytes`."""
    is_refused: bool = False
    """Whether the picker answered the client itself, which ends the stream."""


class ExtProcService(ExternalProcessorServicer):
    """`envoy.service.ext_proc.v3.ExternalProcessor`."""

    def __init__(self, config: PickerConfig, picker: PoolPicker, metrics: PickerMetrics) -> None:
        """
        Args:
            config: all settings.
            picker: decides.
            metrics: metrics of the streams.
        """
        self._config = config
        self._picker = picker
        self._metrics = metrics
        self.num_streams = 0
        """Number of open streams."""
        self.num_held_bytes = 0
        """Bytes of bodies that streams hold."""

    async def Process(  # noqa: N802  a method of the protocol
        self, request_iterator: AsyncIterator[pb.ProcessingRequest], context: object
    ) -> AsyncGenerator[pb.ProcessingResponse, None]:
        """Answer the messages of one stream; see `Exchange`.

        Raises:
            InvalidRequest: the proxy sent a message that the protocol does not allow now.
        """
        del context
        stream = _Stream(Exchange(self._config.max_body_bytes))
        self.num_streams += 1
        try:
            async for message in request_iterator:
                if message.observability_mode:
                    continue  # the proxy ignores answers, and a pick that is not used must not count
                for response in await self._handle(stream, message):
                    yield response
                if stream.is_refused:
                    return
        finally:
            self.num_streams -= 1
            self._close(stream)

    async def _handle(self, stream: _Stream, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        found = incoming(message, self._config.body_mode)
        if found is None:
            return []
        if isinstance(found, RequestHead):
            stream.headers, stream.subset = found.headers, found.subset
        responses: list[pb.ProcessingResponse] = []
        exchange = stream.exchange
        if self.num_held_bytes > _MAX_HELD_BYTES:
            exchange.max_bytes = 0  # decide with what is there, so that slow uploads cannot take all memory
        pending: list[Outgoing] = exchange.on(found)
        self._count_held(stream)
        while pending:
            todo, pending = pending, []
            for outgoing in todo:
                match outgoing:
                    case Ask():
                        pending += await self._decide(stream, outgoing)
                    case ProxyReply():
                        responses.append(reply(outgoing, self._config.prefill_header))
                    case Refuse():
                        responses.append(refusal(outgoing))
                        stream.is_refused = True
                    case Answered(served=served):
                        self._answered(stream, served)
                    case Complete():
                        self._end(stream, is_known=True)
        self._count_held(stream)
        return responses

    def _count_held(self, stream: _Stream) -> None:
        self.num_held_bytes += stream.exchange.num_bytes - stream.num_counted
        stream.num_counted = stream.exchange.num_bytes

    async def _decide(self, stream: _Stream, ask: Ask) -> list[Outgoing]:
        verdict, stream.entry = await self._picker.decide(ask, stream.headers, stream.subset)
        if isinstance(verdict, Picked):
            stream.picked = verdict
            return stream.exchange.decided(verdict.route)
        return stream.exchange.decided(verdict)

    def _answered(self, stream: _Stream, served: str) -> None:
        if stream.picked is None:
            return
        self._picker.states.answered(stream.picked.sent)
        is_fallback = self._picker.choice.served(stream.picked, served)
        self._metrics.served("fallback" if is_fallback else "picked" if served else "unknown")

    def _close(self, stream: _Stream) -> None:
        stream.exchange.closed()
        self._count_held(stream)
        # Proxies that do not send response bodies close the stream when the response begins.
        self._end(stream, is_known=False)

    def _end(self, stream: _Stream, *, is_known: bool) -> None:
        if stream.picked is not None:
            picked, entry, stream.picked, stream.entry = stream.picked, stream.entry, None, None
            self._picker.ended(picked, entry, is_known=is_known)
