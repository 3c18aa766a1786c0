"""A gateway's channels to a worker across renewals of its certificate."""

from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.servers.pool_certificates import PoolFolder, an_authority

from kvferry.gateway.decide.config import Endpoint
from kvferry.gateway.fleet import worker_channels
from kvferry.gateway.fleet.worker_channels import WorkerChannels
from kvferry.rpc.server import start_server
from kvferry.rpc.tls.pool_tls import PoolTls

ASKED = health_pb2.HealthCheckRequest()
SECONDS = 20.0


async def test_a_replaced_channel_is_closed_after_its_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_channels, "REPLACED_POLLS", 2)
    authority = an_authority()
    pool = PoolFolder(tmp_path, authority)
    worker, gateway = PoolTls(pool.worker, is_worker=True), PoolTls(pool.gateway, is_worker=False)
    server = await start_server("127.0.0.1:0", [], credentials=worker.server_credentials)
    channels = WorkerChannels(Endpoint.parse(server.address), gateway)
    channels.open()
    first = channels.work
    watching = health_pb2_grpc.HealthStub(first).Watch(ASKED)
    assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    held = object()
    assert not channels.renew({held}), "the certificate is unchanged"
    pool.issue("gateway", authority, days=20)
    assert gateway.renew()
    assert channels.renew({held})
    assert not channels.renew({held})
    assert channels.work is not first
    assert (await health_pb2_grpc.HealthStub(channels.work).Check(ASKED, timeout=SECONDS)) is not None
    for _ in range(5):
        await channels.close_replaced({held})
    await server.set_ready(True)
    assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING, (
        "a call in flight continues on the old channel"
    )
    watching.cancel()
    await channels.close_replaced(set())
    with pytest.raises(grpc.aio.UsageError, match="closed"):
        await health_pb2_grpc.HealthStub(first).Check(ASKED, timeout=SECONDS)
    await channels.close(gracefully=False)
    await server.stop(0)


async def test_replaced_channels_are_kept_for_calls_that_are_not_counted(tmp_path: Path) -> None:
    authority = an_authority()
    pool = PoolFolder(tmp_path, authority)
    gateway = PoolTls(pool.gateway, is_worker=False)
    channels = WorkerChannels(Endpoint.parse("127.0.0.1:1"), gateway)
    channels.open()
    first = channels.work
    pool.issue("gateway", authority, days=20)
    assert gateway.renew()
    assert channels.renew(())
    for _ in range(worker_channels.REPLACED_POLLS - 1):
        await channels.close_replaced(())
    assert first.get_state() is grpc.ChannelConnectivity.IDLE
    await channels.close_replaced(())
    assert first.get_state() is grpc.ChannelConnectivity.SHUTDOWN
    await channels.close(gracefully=False)


async def test_channels_without_tls_are_never_replaced() -> None:
    channels = WorkerChannels(Endpoint.parse("127.0.0.1:1"), None)
    await channels.close(gracefully=False)  # before the channel is opened
    channels.open()
    assert not channels.renew(())
    await channels.close(gracefully=False)
