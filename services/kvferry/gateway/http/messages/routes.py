"""The routes of the Messages API: an answer, whole or as events, and the number of a prompt's tokens."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from kvferry.core.errors import InvalidRequest, KvferryError
from kvferry.core.inference.chunks import Usage
from kvferry.gateway.http.body_route import JSON, BodyRoute, note_ignored, prepared, while_connected
from kvferry.gateway.http.messages import output as out
from kvferry.gateway.http.messages.body import ReadMessage, read_count, read_message
from kvferry.gateway.http.messages.progress import MessageProgress, usage_of
from kvferry.gateway.http.openai import generation as chat
from kvferry.gateway.http.openai.reply import encode
from kvferry.serving.request import Caller
from kvferry.serving.text_service import TextService

PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
"""Paths whose errors have Anthropic's form."""


class MessageCreation:
    """A valid request, and the answer to it."""

    def __init__(self, read: ReadMessage, generation: chat.Generation) -> None:
        """
        Args:
            read: the request.
            generation: its generation, not started yet.
        """
        self._generation, self._names = generation, read.names
        self.ignored = read.ignored
        """Names of the request's fields without effect."""
        request = generation.requests[0]
        adapter = request.caller.adapter
        begun = out.AnswerMessage(
            id=f"msg_{request.caller.request_id}",
            model=generation.service.model.name if adapter is None else adapter.name,
            content=[],
            usage=usage_of(Usage(len(request.token_ids), 0)),
        )
        self._progress = MessageProgress(begun, read.max_tokens)

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is streamed as events."""
        return self._generation.stream

    async def whole(self) -> bytes:
        """Generate, and return the answer as JSON.

        Raises:
            KvferryError: the generation failed.
        """
        async with aclosing(self._events()) as events:
            async for _ in events:
                pass
        return encode(self._progress.message)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Generate, and yield server-sent events.

        Raises:
            KvferryError: the generation failed, before or after the first event.
        """
        async with aclosing(self._events()) as events:
            async for event in events:
                yield out.sse(event)

    async def _events(self) -> AsyncGenerator[out.Event, None]:
        begun = False
        try:
            async with aclosing(self._generation.chunks()) as chunks:
                async for chunk in chunks:
                    if not begun:  # after the first chunk, so that a refused request has no events
                        begun = True
                        yield out.MessageStart(self._progress.message)
                    for event in self._progress.add(chunk):
                        yield event
        except InvalidRequest as error:
            raise self._names.of(error) from None


async def create(service: TextService, caller: Caller, body: bytes, *, is_strict: bool = False) -> MessageCreation:
    """Validate a request.

    Args:
        service: the served model, and its limits.
        caller: request id, tenant and arrival time.
        body: body of the request, JSON.
        is_strict: whether unknown fields are refused.

    Raises:
        InvalidRequest: a field is invalid or not supported.
        UnknownModel: this gateway serves a different model.
    """
    read = await service.read(caller.client, read_message, len(body), body, is_strict=is_strict)
    try:
        return MessageCreation(read, await chat.prepared(service, caller, read.chat, is_chat=True))
    except InvalidRequest as error:
        raise read.names.of(error) from None


class CreateMessage(BodyRoute):
    """ASGI handler of POST /v1/messages."""

    async def serve(self, request: Request, send: Send) -> None:
        """See `BodyRoute.serve`."""
        receive = request.receive
        async with self.body(request) as (caller, body):
            context = self.context
            creating = create(context.service, caller, body, is_strict=context.config.strict_fields)
            made = await prepared(receive, body, creating)
            del body, creating
        note_ignored(request, made.ignored)
        if made.is_streamed:

            def failed(error: KvferryError) -> bytes:
                return out.error_event(error, caller.request_id)

            await self.stream(request, send, made.events(), end=b"", failed=failed)
        else:
            whole = await while_connected(receive, made.whole())
            await Response(whole, media_type=JSON)(request.scope, receive, send)


class CountMessageTokens(BodyRoute):
    """ASGI handler of POST /v1/messages/count_tokens."""

    async def serve(self, request: Request, send: Send) -> None:
        """See `BodyRoute.serve`."""
        service, receive = self.context.service, request.receive
        async with self.body(request) as (caller, body):
            is_strict = self.context.config.strict_fields
            reading = service.read(caller.client, read_count, len(body), body, is_strict=is_strict)
            read = await prepared(receive, body, reading)
        service.count(caller.tenant)
        note_ignored(request, read.ignored)
        adapter = service.adapter_of(read.model)
        service.check_access(caller.tenant, service.model.name if adapter is None else adapter.name)
        whole = encode(out.TokenCount(read.num_tokens))
        await Response(whole, media_type=JSON)(request.scope, receive, send)
