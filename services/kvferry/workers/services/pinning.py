"""Pins prefixes in this worker's engine for `WorkerAdmin.PinPrefix` and `UnpinPrefix`."""

from uuid import uuid4

from kvferry.core.errors import InvalidRequest
from kvferry.core.sampling import SamplingParams
from kvferry.engine.schedule.messages import EngineRequest, PinnedPrefix
from kvferry.rpc import wire, worker_wire
from kvferry.v1 import worker_admin_pb2
from kvferry.workers.calls.context import WorkerContext, sequence_id


class PrefixPinning:
    """Pins of one engine."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    async def pin(
        self, request: worker_admin_pb2.PinPrefixRequest, seconds: float | None
    ) -> worker_admin_pb2.PinPrefixResponse:
        """Pin a prefix.

        Args:
            request: the call.
            seconds: seconds until the call's deadline; `None` without a deadline.

        Raises:
            KvferryError: a field is invalid, or the worker is draining; also the errors of
                `engine.schedule.pins.pinning.Pinning.pin`.
        """
        self._context.admit(request.model, request.scope)
        pin = await self._context.loop.pin_prefix(
            EngineRequest(
                request_id=sequence_id(f"pin-{uuid4().hex[:8]}", 0),
                token_ids=_token_ids(request),
                sampling=SamplingParams(temperature=0.0, max_tokens=1),
                scope=request.scope,
                adapter=worker_wire.adapter_from_wire(request),
                deadline=self._context.deadline_in(seconds),
            ),
            request.ttl_seconds,
        )
        return worker_admin_pb2.PinPrefixResponse(pin=_to_wire(pin))

    async def unpin(self, request: worker_admin_pb2.UnpinPrefixRequest) -> worker_admin_pb2.UnpinPrefixResponse:
        """End the pin of a prefix.

        Raises:
            InvalidRequest: a field is invalid.
            Unavailable: the engine has stopped.
        """
        self._context.check_scope(request.scope)
        tokens = _token_ids(request)
        pin = await self._context.loop.unpin_prefix(request.scope, tokens)
        return worker_admin_pb2.UnpinPrefixResponse(pin=None if pin is None else _to_wire(pin))


def _token_ids(request: worker_admin_pb2.PinPrefixRequest | worker_admin_pb2.UnpinPrefixRequest) -> list[int]:
    tokens = wire.token_ids_from_wire(request.token_ids, "token_ids")
    if not tokens:
        raise InvalidRequest("token_ids is empty; send at least one block of tokens", field="token_ids")
    return list(tokens)


def _to_wire(pin: PinnedPrefix) -> worker_admin_pb2.PinnedPrefix:
    return worker_admin_pb2.PinnedPrefix(
        name=pin.name, num_tokens=pin.num_tokens, num_blocks=pin.num_blocks, seconds_left=pin.seconds_left
    )
