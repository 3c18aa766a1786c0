"""Waits until a server reports SERVING over `grpc.health.v1.Health`."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.core.errors import Unavailable
from kvferry.rpc.channel import open_channel

_RETRY_SECONDS = 0.05


async def wait_serving(address: str, timeout: float, service: str = "") -> None:
    """Return when `service` at `address` reports SERVING.

    Args:
        address: address of the server, `host:port`.
        timeout: time limit in seconds.
        service: full name of the service; empty for the whole server.

    Raises:
        Unavailable: the service did not report SERVING within `timeout` seconds.
    """
    channel = open_channel(address)
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        async with asyncio.timeout(timeout):
            while True:
                try:
                    async for answer in stub.Watch(health_pb2.HealthCheckRequest(service=service)):
                        if answer.status == health_pb2.HealthCheckResponse.SERVING:
                            return
                except grpc.aio.AioRpcError:  # not listening yet, or restarting
                    await asyncio.sleep(_RETRY_SECONDS)
    except TimeoutError:
        raise Unavailable(f"the server at {address} did not become ready within {timeout:.0f} s") from None
    finally:
        await channel.close()
