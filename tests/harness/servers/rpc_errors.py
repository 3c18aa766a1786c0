"""Errors of gRPC calls as clients of the project see them."""

from typing import Any

import grpc
import pytest

from kvferry.core.errors import KvferryError
from kvferry.rpc.errors import error_from_rpc


async def failure(call: Any) -> KvferryError:
    """Return the error with which a call fails; it is read to its end if it is a stream."""

    async def finish() -> None:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            async for _ in call:
                pass
        else:
            await call

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await finish()
    return error_from_rpc(caught.value)
