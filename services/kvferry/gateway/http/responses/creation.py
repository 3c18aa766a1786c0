"""Creates one response: reads the request, generates the output, and stores the result for the next turn."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from kvferry.core.errors import InvalidRequest, KvferryError
from kvferry.core.ids import new_request_id
from kvferry.core.process.struct_types import describe
from kvferry.gateway.http.body_route import BodyBudget, BufferedBody
from kvferry.gateway.http.fields.request_fields import overflow_in
from kvferry.gateway.http.openai.generation import Generation, prepared
from kvferry.gateway.http.openai.reply import encode
from kvferry.gateway.http.responses import output as out
from kvferry.gateway.http.responses.body import ReadResponse, read_response
from kvferry.gateway.http.responses.carrier import CarrierKey
from kvferry.gateway.http.responses.progress import ResponseProgress
from kvferry.gateway.http.responses.store import Earlier, NewResponse, ResponseStore, ResponsesUnavailable
from kvferry.gateway.http.responses.tools import without_function
from kvferry.serving.request import Caller, ClientIdentity
from kvferry.serving.text_service import TextService


class _Peek(msgspec.Struct):
    previous_response_id: Any = None


describe(_Peek)


class Creation:
    """A valid request, and the response created from it."""

    def __init__(
        self,
        read: ReadResponse,
        generation: Generation,
        earlier: Earlier | None,
        store: ResponseStore | None,
        tenant: str,
        key: CarrierKey,
    ) -> None:
        """
        Args:
            read: the request.
            generation: its generation, not started yet.
            earlier: the response that it continues; `None` for the first turn.
            store: store of the new response; `None` if it is not stored.
            tenant: owner of the new response.
            key: seals the carriers of reasoning, if the request includes them.
        """
        self._read, self._generation, self._earlier = read, generation, earlier
        self._store, self._tenant = store, tenant
        begun = _begun(read, generation, is_kept=store is not None)
        seal = key.seal if read.body.has_carriers else None
        spell = generation.service.model.tokenizer.token_bytes
        self._progress = ResponseProgress(begun, spell, seal, read.body.custom_names)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of the request's fields without effect."""
        return self._read.ignored

    @property
    def is_streamed(self) -> bool:
        """Whether the response is streamed as events."""
        return self._generation.stream

    @property
    def is_background(self) -> bool:
        """Whether the response is created after its request has been answered."""
        return self._read.body.background is True

    @property
    def response_id(self) -> str:
        return self._progress.response.id

    @property
    def is_over(self) -> bool:
        """Whether the response has ended."""
        return self._progress.response.status not in ("queued", "in_progress")

    def so_far(self) -> bytes:
        """Return the response with its output so far, as JSON."""
        return encode(self._progress.so_far())

    async def whole(self) -> bytes:
        """Generate, and return the response as JSON.

        Raises:
            KvferryError: the generation failed, or the response must be stored and was not.
        """
        async with aclosing(self._generation.chunks()) as chunks:
            async for chunk in chunks:
                for _ in self._progress.add(chunk):
                    pass
        await self.keep()
        return encode(self._progress.response)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Generate, and yield server-sent events.

        Raises:
            KvferryError: the generation failed, before or after the first event, or the response must be stored and was
                not.
        """
        async with aclosing(self._made()) as steps:
            async for made in steps:
                if self.is_over:
                    # Before the client receives the last event and may continue from the response, and after those
                    # events that do not depend on it.
                    for event in made[:-1]:
                        yield _sse(event)
                    del made[:-1]
                    await self.keep()
                for event in made:
                    yield _sse(event)

    async def steps(self) -> AsyncGenerator[list[bytes], None]:
        """Generate, and yield the server-sent events of each step; does not store the response.

        Raises:
            KvferryError: the generation failed.
        """
        async with aclosing(self._made()) as steps:
            async for made in steps:
                yield [_sse(event) for event in made]

    async def _made(self) -> AsyncGenerator[list[out.Event], None]:
        async with aclosing(self._generation.chunks()) as chunks:
            is_begun = False
            async for chunk in chunks:
                # Events begin after the first chunk, so that a refused request has none.
                made = [] if is_begun else self._progress.begin()
                is_begun = True
                yield [*made, *self._progress.add(chunk)]

    def queue(self) -> list[bytes]:
        """Put a response in the background, which waits to begin; return its first events."""
        return [_sse(event) for event in self._progress.queue()]

    def cancel(self) -> bytes:
        """End a response before it is complete; return its last event."""
        return _sse(self._progress.cancel(self._generation.service.clock.wall()))

    def failed(self, error: KvferryError) -> bytes:
        """Return the last event of a stream that failed."""
        return _sse(self._progress.fail(error, self._generation.service.clock.wall()))

    async def keep(self) -> None:
        """Store the ended response if its request asks for that. If it is not stored, the response says so; a request
        that does not name `store` gets its response nevertheless.

        Raises:
            ResponsesUnavailable: the request sets `store`, and the server that keeps responses does not answer.
        """
        response = self._progress.response
        if self._store is None or not response.store:
            return
        try:
            response.store = await self._store.put(self._tenant, response.id, self.stored())
        except ResponsesUnavailable:
            if self._read.body.store:
                raise
            response.store = False

    def stored(self, events: tuple[bytes, ...] = ()) -> NewResponse:
        """Return what is stored of the response, as it is now.

        Args:
            events: its events, for clients that read them again.
        """
        response = self._progress.response
        items = encode(self._read.items)
        return NewResponse(encode(response), items, encode(list(response.output)), self._earlier, events)


async def create(
    service: TextService,
    caller: Caller,
    body: bytes,
    store: ResponseStore | None,
    key: CarrierKey,
    *,
    bodies: BodyBudget,
    is_strict: bool = False,
) -> Creation:
    """Validate a request.

    Args:
        service: the served model, and its limits.
        caller: request id, tenant and arrival time.
        body: body of the request, JSON.
        store: the stored responses; `None` if this gateway stores none.
        key: key of the tenant's carriers of reasoning.
        bodies: bytes of the bodies that are being read; the items of the previous responses count as well.
        is_strict: whether unknown fields are refused.

    Raises:
        InvalidRequest: a field is invalid or not supported.
        Overloaded: too many bytes are being read.
        ResponseNotFound: the previous response is not stored.
        ResponsesUnavailable: the server that keeps responses does not answer.
        UnknownModel: this gateway serves a different model.
    """
    with BufferedBody(bodies) as buffered, overflow_in("input"):
        earlier, before = await earlier_response(caller, body, store)
        buffered.grow(sum(map(len, before)))
        read = await _read(service, caller.client, body, before, service.served_tokens, key, is_strict=is_strict)
        del before  # a request that waits for room holds only its tokens
    if read.body.background and not read.body.is_stored:
        raise InvalidRequest(
            "background needs a stored response; leave store out, or set it to true", field="background"
        )
    if read.body.background and caller.is_batch_line:
        raise InvalidRequest("background is not supported in a batch; leave it out", field="background")
    if read.body.background and store is None:
        raise InvalidRequest(
            "background is not supported by this gateway, which stores no responses because it runs as several "
            "processes without --state; leave it out",
            field="background",
        )
    if store is not None and (read.body.store or read.body.background) and not caller.is_batch_line:
        store.check()  # before anything is computed
    try:
        with overflow_in("input"):
            generation = await prepared(service, caller, read.chat, is_chat=True)
    except InvalidRequest as error:
        raise without_function(error, read.body.tools or ()) from None
    kept = None if caller.is_batch_line else store  # the lines of a batch would displace the responses of all others
    return Creation(read, generation, earlier, kept, caller.tenant, key)


async def count(
    service: TextService,
    caller: Caller,
    body: bytes,
    store: ResponseStore | None,
    key: CarrierKey,
    *,
    is_strict: bool = False,
) -> tuple[int, tuple[str, ...]]:
    """Return the number of tokens of the prompt, and the names of the request's fields without effect.

    Args:
        service: the served model, and its limits.
        caller: tenant of the request.
        body: body of the request, JSON.
        store: the stored responses; `None` if this gateway stores none.
        key: key of the tenant's carriers of reasoning.
        is_strict: whether unknown fields are refused.

    Raises:
        InvalidRequest: a field is invalid or not supported.
        Overloaded: the tenant's quota of requests is used up.
        ResponseNotFound: the previous response is not stored.
        UnknownModel: this gateway serves a different model.
    """
    _, before = await earlier_response(caller, body, store)
    read = await _read(service, caller.client, body, before, None, key, is_strict=is_strict)
    service.count(caller.tenant)
    adapter = service.adapter_of(read.chat.model)
    service.check_access(caller.tenant, service.model.name if adapter is None else adapter.name)
    return len(read.chat.prompts[0]), read.ignored


async def _read(
    service: TextService,
    client: ClientIdentity,
    body: bytes,
    before: Sequence[bytes],
    context_tokens: int | None,
    key: CarrierKey,
    *,
    is_strict: bool,
) -> ReadResponse:
    size = len(body) + sum(map(len, before))
    return await service.read(client, read_response, size, body, before, context_tokens, key.key, is_strict=is_strict)


async def earlier_response(
    caller: Caller, body: bytes, store: ResponseStore | None
) -> tuple[Earlier | None, Sequence[bytes]]:
    """Return the response that a body continues, `None` if it continues none, and the items of its conversation. Errors
    in the body are found when it is read.

    Raises:
        ConversationTooLong: the conversation has reached a bound.
        InvalidRequest: this gateway stores no responses.
        ResponseNotFound: the response is not stored.
        ResponsesUnavailable: the server that keeps responses does not answer.
    """
    try:
        request = msgspec.json.decode(body, type=_Peek).previous_response_id
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None, []
    if not isinstance(request, str):
        return None, []
    if store is None:
        raise InvalidRequest(
            "previous_response_id is not supported by this gateway, which stores no responses because it runs as "
            "several processes without --state; send the conversation's items as input",
            field="previous_response_id",
        )
    return await store.continued(caller.tenant, request, "previous_response_id")


def _begun(read: ReadResponse, generation: Generation, *, is_kept: bool) -> out.Response:
    body, request = read.body, generation.requests[0]
    adapter, sampling = request.caller.adapter, request.sampling
    shown = body.model_dump(mode="json", by_alias=True, exclude_none=True, include={"tools", "tool_choice", "text"})
    return out.Response(
        id=f"resp_{new_request_id()}",
        created_at=generation.created,
        model=generation.service.model.name if adapter is None else adapter.name,
        status="in_progress",
        output=[],
        metadata=dict(body.metadata or {}),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        store=body.is_stored and is_kept,
        tool_choice=shown.get("tool_choice", "auto"),
        tools=shown.get("tools", []),
        text={"format": {"type": "text"}, **shown.get("text", {})},
        instructions=body.instructions,
        previous_response_id=body.previous_response_id,
        max_output_tokens=body.max_output_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_logprobs=body.top_logprobs or 0,
        user=body.user,
        background=body.background is True,
        truncation=body.truncation or "disabled",
    )


def _sse(event: out.Event) -> bytes:
    name = type(event).__struct_config__.tag
    return f"event: {name}\ndata: ".encode() + encode(event) + b"\n\n"
