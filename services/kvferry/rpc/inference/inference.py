"""The `Inference` service on top of a token source, used by gateways and by workers of role `both`."""

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import unquote

import grpc

from kvferry.core.errors import InvalidRequest, KvferryError
from kvferry.core.ids import AdapterId, RequestId, new_request_id
from kvferry.core.retention import NO_HINTS, CacheHints
from kvferry.core.sampling import SamplingParams
from kvferry.core.traces.spans import context_of, use_span
from kvferry.rpc import retention_wire, wire
from kvferry.rpc.call_interceptor import request_id_of
from kvferry.rpc.inference.text_wire import (
    beams_from_wire,
    chunk_to_wire,
    messages_from_wire,
    tool_use_from_wire,
    variables_from_wire,
)
from kvferry.rpc.inference.vector_wire import vectors_to_wire
from kvferry.rpc.server import Service
from kvferry.rpc.wire import pooling_from_wire
from kvferry.serving import embedding, prompts
from kvferry.serving.embedding import VectorRequest
from kvferry.serving.prompts import PreparedChat
from kvferry.serving.request import EXPLAIN_HEADER, Caller, ClientIdentity, Request
from kvferry.serving.text_model import TextModel
from kvferry.serving.text_service import TextService
from kvferry.v1 import inference_pb2, inference_pb2_grpc

_MESSAGE_CHARS = 64
SERVICE_NAME = "kvferry.v1.Inference"
Context = grpc.aio.ServicerContext[Any, Any]
P = ParamSpec("P")
R = TypeVar("R")


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Implements `kvferry.v1.Inference` for one model."""

    def __init__(self, text: TextService) -> None:
        self._text = text

    async def Generate(  # noqa: N802  name of the RPC
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        arrived = self._text.clock.monotonic()
        client = self._client(context)
        adapter = self._text.adapter_of(request.model)
        self._text.check_access(client.tenant, request.model or self._text.model.name)
        num_samples = wire.num_samples_from_wire(request.n)
        prepared = await self._prepared(client, request, wire.sampling_from_wire(request.sampling))
        caller = self._caller(request, context, client, arrived, adapter)
        checked = self._text.fit(
            Request(
                caller,
                prepared.token_ids,
                prepared.sampling,
                num_samples=num_samples,
                split=prepared.split,
                beams=beams_from_wire(request, num_samples),
                held_bytes=request.ByteSize(),
            )
        )
        checked = await self._text.checked(checked)
        with self._traced("Generate", caller.request_id, arrived, context):
            async with aclosing(self._text.generate(checked)) as chunks:
                async for chunk in chunks:
                    yield chunk_to_wire(caller.request_id, chunk)

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        client = self._admit(request.model, context)
        if request.WhichOneof("input") == "chat":
            ids = await self._read_chat(client, _encode_chat, request.chat)
        else:
            ids = await self._encode_text(client, request.text)
        self._text.count(client.tenant)
        return inference_pb2.TokenizeResponse(token_ids=ids)

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        self._text.count(self._admit(request.model, context).tenant)
        prompts.check_num_tokens(self._text.model, len(request.token_ids) - 1)  # a whole context may be detokenized
        ids = wire.token_ids_from_wire(request.token_ids, "token_ids")
        prompts.check_token_ids(self._text.model, ids, "token_ids")
        return inference_pb2.DetokenizeResponse(text=self._text.model.tokenizer.decode(ids))

    async def GetModelInfo(  # noqa: N802
        self, request: inference_pb2.GetModelInfoRequest, context: Context
    ) -> inference_pb2.GetModelInfoResponse:
        self._admit(request.model, context)
        model = self._text.model
        return inference_pb2.GetModelInfoResponse(
            model=model.name,
            digest=model.digest,
            max_model_tokens=self._text.served_tokens,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )

    async def Embed(  # noqa: N802
        self, request: inference_pb2.EmbedRequest, context: Context
    ) -> inference_pb2.EmbedResponse:
        arrived = self._text.clock.monotonic()
        client = self._admit(request.model, context)
        caller = self._caller(request, context, client, arrived, None)
        params = pooling_from_wire(request.pooling)
        embedding.check_vectors(self._text, params, len(request.inputs), "inputs")
        names = [f"inputs.{number}" for number in range(len(request.inputs))]
        given = [_input(item, name) for item, name in zip(request.inputs, names, strict=True)]
        vectors = VectorRequest(
            caller, await embedding.read_inputs(self._text, client, given, names), params, held_bytes=request.ByteSize()
        )
        with self._traced("Embed", caller.request_id, arrived, context):
            return vectors_to_wire(caller.request_id, await embedding.embed(self._text, vectors))

    def _caller(
        self,
        request: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest,
        context: Context,
        client: ClientIdentity,
        arrived: float,
        adapter: AdapterId | None,
    ) -> Caller:
        named = request_id_of(request, context)
        remaining = context.time_remaining()
        return Caller(
            RequestId(wire.check_request_id(named)) if named else new_request_id(),
            client.tenant,
            wire.check_cache_salt(request.cache_salt),
            adapter,
            wire.check_priority(request.priority),
            arrived,
            None if remaining is None else arrived + remaining,
            is_explained=any(key == EXPLAIN_HEADER for key, _ in context.invocation_metadata() or ()),
            address=client.address,
            hints=_hints(request),
        )

    @contextmanager
    def _traced(self, method: str, request_id: RequestId, arrived: float, context: Context) -> Iterator[None]:
        """Trace the call for the length of the `with` block; gRPC runs each call in its own task."""
        tracer = self._text.tracer()
        if tracer is None:
            yield
            return
        attributes = {"rpc.system": "grpc", "rpc.method": method, "kvferry.request_id": request_id}
        parent = context_of(context.invocation_metadata())
        span = tracer.begin(f"{SERVICE_NAME}/{method}", parent, arrived, attributes)
        use_span(span)
        failure = "cancelled"
        try:
            yield
            failure = ""
        except KvferryError as error:
            failure = error.reason.lower()
            raise
        finally:
            if span is not None:
                span.end(failure)

    def _admit(self, model: str, context: Context) -> ClientIdentity:
        """Check the API key, the model name and the tenant's access to it; return the client."""
        client = self._client(context)
        prompts.check_model(self._text.model, model)
        self._text.check_access(client.tenant, model or self._text.model.name)
        return client

    def _client(self, context: Context) -> ClientIdentity:
        """Check the API key; return the client."""
        header: str | None = None
        for key, value in context.invocation_metadata() or ():
            if key == "authorization" and isinstance(value, str):
                header = value
        address = _host_of(context.peer() or "")
        return ClientIdentity(self._text.tenant_of(header, address), address)

    async def _prepared(
        self, client: ClientIdentity, request: inference_pb2.GenerateRequest, sampling: SamplingParams
    ) -> PreparedChat:
        kind = request.WhichOneof("prompt")
        if kind == "text":
            return PreparedChat(await self._encode_text(client, request.text), sampling)
        if kind == "tokens":
            return PreparedChat(wire.token_ids_from_wire(request.tokens.ids, "prompt"), sampling)
        if kind == "chat":
            return await self._read_chat(client, _prepare_chat, request.chat, sampling)
        raise InvalidRequest("the request has no prompt; set text, tokens or chat", field="prompt")

    async def _encode_text(self, client: ClientIdentity, text: str) -> list[int]:
        prompts.check_num_chars(self._text.model, len(text))
        return await self._text.read(client, prompts.encode_text, len(text), text)

    async def _read_chat(
        self,
        client: ClientIdentity,
        job: Callable[Concatenate[TextModel, bytes, P], R],
        chat: inference_pb2.Chat,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        prompts.check_num_messages(len(chat.messages))
        # Each message and tool adds a fixed cost to rendering, however short it is.
        size = chat.ByteSize() + _MESSAGE_CHARS * (len(chat.messages) + len(chat.tools))
        return await self._text.read(client, job, size, chat.SerializeToString(), *args, **kwargs)


def _input(item: inference_pb2.EmbedRequest.Input, name: str) -> embedding.Input:
    kind = item.WhichOneof("input")
    if kind is None:
        raise InvalidRequest(f"{name} has neither text nor tokens; set one of them", field=name)
    return item.text if kind == "text" else wire.token_ids_from_wire(item.tokens.ids, name)


def _encode_chat(model: TextModel, chat: bytes) -> list[int]:
    read = inference_pb2.Chat.FromString(chat)
    return prompts.encode_chat(model, messages_from_wire(read), tool_use_from_wire(read), variables_from_wire(read))


def _prepare_chat(model: TextModel, chat: bytes, sampling: SamplingParams) -> PreparedChat:
    read = inference_pb2.Chat.FromString(chat)
    variables = variables_from_wire(read)
    budget = read.max_reasoning_tokens if read.HasField("max_reasoning_tokens") else None
    return prompts.prepare_chat(
        model,
        messages_from_wire(read),
        tool_use_from_wire(read),
        sampling,
        variables,
        max_reasoning_tokens=budget,
        stops_in_reasoning=read.stop_in_reasoning,
    )


def inference_service(text: TextService) -> Service:
    """Create the Inference service, to be passed to `rpc.server.start_server`."""
    servicer = InferenceServicer(text)
    return Service(SERVICE_NAME, lambda server: inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server))


def _host_of(peer: str) -> str:
    """Return the host from gRPC's name for a peer, for example `ipv4:10.0.0.5:40000` or `ipv6:%5B::1%5D:40000`."""
    return unquote(peer.partition(":")[2].rpartition(":")[0]).strip("[]")


def _hints(request: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest) -> CacheHints:
    if isinstance(request, inference_pb2.EmbedRequest):
        return NO_HINTS
    return retention_wire.hints_from_wire(request.retain_seconds, request.affinity_key)
