"""A gateway's HTTP and gRPC APIs in front of a model that gives prepared answers."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from harness.fakes.byte_model import byte_model
from kvferry.core.errors import KvferryError
from kvferry.core.sampling import FinishReason, SampledToken
from kvferry.gateway.decide.config import HttpConfig
from kvferry.gateway.dispatch.journal import Journal
from kvferry.gateway.http.client_api import ClientApi
from kvferry.gateway.http.responses.routes import ResponseRoutes
from kvferry.gateway.http.server.http_server import HttpServer
from kvferry.gateway.observe.instruments import GatewayInstruments
from kvferry.rpc.inference.inference import inference_service
from kvferry.rpc.server import start_server
from kvferry.serving.request import Request
from kvferry.serving.text_service import TextService
from kvferry.serving.token_source import TokenEvent
from kvferry.text.answers.registry import CallFormat


@dataclass
class AnswerSource:
    """A `TokenSource` that gives prepared answers; a token is a byte."""

    answers: Sequence[str] = ()
    """Answers by sample."""
    bytes_per_step: int = 3
    finish: FinishReason = FinishReason.STOP
    delay_seconds: float = 0.0
    """Time before the first token."""
    error: KvferryError | None = None
    """Raised instead of an answer, after the delay."""
    held: asyncio.Event | None = None
    """Awaited after the first step of an answer."""
    num_open: int = 0
    """Number of answers that are being given."""
    requests: list[Request] = field(default_factory=list)

    @property
    def prompt(self) -> str:
        """Text of the latest prompt."""
        return bytes(self.requests[-1].token_ids).decode()

    async def stream(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        self.requests.append(request)
        self.num_open += 1
        try:
            async for event in self._events(request):
                yield event
        finally:
            self.num_open -= 1

    async def _events(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        left = self.answers[request.sample_index].encode()[len(request.prior_ids) :]
        wants_logprobs = request.sampling.logprobs is not None
        await asyncio.sleep(self.delay_seconds)
        if self.error is not None:
            raise self.error
        while left:
            await asyncio.sleep(0)
            step, left = left[: self.bytes_per_step], left[self.bytes_per_step :]
            yield TokenEvent(tuple(SampledToken(byte, -0.5 if wants_logprobs else None) for byte in step))
            if self.held is not None:
                await self.held.wait()
        yield TokenEvent((), self.finish)


@dataclass
class AnsweringApi:
    """Addresses of the APIs, and their source of answers."""

    source: AnswerSource
    url: str
    grpc: str
    responses: ResponseRoutes


@asynccontextmanager
async def answering_api(
    call_format: CallFormat, *, has_reasoning: bool = False, http: HttpConfig | None = None
) -> AsyncIterator[AnsweringApi]:
    """Serve the byte model with prepared answers; the caller sets `source.answers` before each request."""
    source = AnswerSource()
    model = byte_model(1 << 16, call_format, has_reasoning=has_reasoning)
    service = TextService(source, model)
    config = http or HttpConfig()
    api = ClientApi(service, config, GatewayInstruments(), lambda: (True, ()), Journal())
    seconds = config.http_keepalive_seconds
    server = await HttpServer.start(api.app(), "127.0.0.1:0", field="http", drain_seconds=5, keepalive_seconds=seconds)
    grpc = await start_server("127.0.0.1:0", [inference_service(service)])
    try:
        yield AnsweringApi(source, f"http://{server.address}/v1", grpc.address, api.responses)
    finally:
        await grpc.stop(0)
        await api.responses.stop(0.0)
        await server.stop()
