"""Pins of a scripted worker."""

from typing import Any

from blake3 import blake3

from kvferry.core.errors import KvferryError
from kvferry.v1 import worker_admin_pb2
from kvferry.v1.worker_admin_pb2_grpc import WorkerAdminServicer


class ScriptedPins(WorkerAdminServicer):
    """The part of a scripted worker that pins prefixes."""

    def __init__(self) -> None:
        self.pins: dict[bytes, worker_admin_pb2.PinPrefixRequest] = {}
        """Latest pin by name, a digest of scope and tokens; a restart ends all."""
        self.num_pin_calls = 0
        self.pin_error: KvferryError | None = None
        """Raised by every pin and unpin."""

    async def PinPrefix(
        self, request: worker_admin_pb2.PinPrefixRequest, context: Any
    ) -> worker_admin_pb2.PinPrefixResponse:
        self.num_pin_calls += 1
        if self.pin_error is not None:
            raise self.pin_error
        name = _pin_name(request)
        self.pins[name] = request
        pin = worker_admin_pb2.PinnedPrefix(name=name, num_tokens=len(request.token_ids), num_blocks=2)
        pin.seconds_left = request.ttl_seconds
        return worker_admin_pb2.PinPrefixResponse(pin=pin)

    async def UnpinPrefix(
        self, request: worker_admin_pb2.UnpinPrefixRequest, context: Any
    ) -> worker_admin_pb2.UnpinPrefixResponse:
        if self.pin_error is not None:
            raise self.pin_error
        pinned = self.pins.pop(_pin_name(request), None)
        if pinned is None:
            return worker_admin_pb2.UnpinPrefixResponse()
        pin = worker_admin_pb2.PinnedPrefix(num_tokens=len(pinned.token_ids), num_blocks=2)
        return worker_admin_pb2.UnpinPrefixResponse(pin=pin)


def _pin_name(request: worker_admin_pb2.PinPrefixRequest | worker_admin_pb2.UnpinPrefixRequest) -> bytes:
    return blake3(repr((request.scope, list(request.token_ids))).encode()).digest()
