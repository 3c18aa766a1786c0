"""Servers and channels of a pool: who may connect, and renewals that affect new connections only."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.servers.pool_certificates import PoolFolder, an_authority

from kvferry.rpc.channel import open_blocking_channel, open_channel
from kvferry.rpc.server import RpcServer, start_server
from kvferry.rpc.tls.pool_tls import PoolTls
from kvferry.rpc.tls.refusal_cause import may_be_tls, refusal_cause

SECONDS = 20.0
SERVING = health_pb2.HealthCheckResponse.SERVING


@asynccontextmanager
async def serving(tls: PoolTls | None) -> AsyncIterator[RpcServer]:
    credentials = None if tls is None else tls.server_credentials
    server = await start_server("127.0.0.1:0", [], credentials=credentials)
    await server.set_ready(True)
    try:
        yield server
    finally:
        await server.stop(0)


async def check(channel: grpc.aio.Channel) -> Any:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)).status


async def failure(address: str, tls: PoolTls | None) -> str:
    """Call a server that refuses the connection; return the details of gRPC's error."""
    async with open_channel(address, tls) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(channel)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return caught.value.details() or ""


def pool_in(folder: Path, name: str, authority: Any = None) -> PoolFolder:
    made = folder / name
    made.mkdir()
    return PoolFolder(made, authority or an_authority(name))


async def test_members_call_each_other_also_over_blocking_channels(tmp_path: Path) -> None:
    pool = pool_in(tmp_path, "pool")
    worker, gateway = PoolTls(pool.worker, is_worker=True), PoolTls(pool.gateway, is_worker=False)
    async with serving(worker) as server:
        for caller in (gateway, worker):
            async with open_channel(server.address, caller) as channel:
                assert await check(channel) == SERVING

        def call() -> Any:
            with open_blocking_channel(server.address, worker) as channel:
                return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)

        assert (await asyncio.to_thread(call)).status == SERVING


async def test_other_clients_are_refused_with_the_cause(tmp_path: Path) -> None:
    pool, other = pool_in(tmp_path, "pool"), pool_in(tmp_path, "other")
    stranger = PoolTls(other.gateway, is_worker=False)
    async with serving(PoolTls(pool.worker, is_worker=True)) as server:
        assert may_be_tls(await failure(server.address, None))
        assert "it requires TLS; set --pool-tls-cert-file" in await asyncio.to_thread(
            refusal_cause, server.address, None
        )
        assert may_be_tls(await failure(server.address, stranger))
        assert "not signed by a CA" in await asyncio.to_thread(refusal_cause, server.address, other.gateway)
        # These callers trust the worker, and have a certificate of a foreign CA or an expired one.
        (other.folder / "ca.crt").write_text((pool.folder / "ca.crt").read_text())
        assert "it does not accept the certificate of this process" in await asyncio.to_thread(
            refusal_cause, server.address, other.gateway
        )
        # Members are not affected.
        async with open_channel(server.address, PoolTls(pool.gateway, is_worker=False)) as channel:
            assert await check(channel) == SERVING
        assert await asyncio.to_thread(refusal_cause, server.address, pool.gateway) == ""


async def test_an_expired_certificate_is_refused_on_both_sides(tmp_path: Path) -> None:
    authority = an_authority()
    pool, old = pool_in(tmp_path, "pool", authority), pool_in(tmp_path, "old", authority)
    old.issue("worker", authority, age_days=20)
    old.issue("gateway", authority, age_days=20)
    gateway = PoolTls(pool.gateway, is_worker=False)
    expired = grpc.ssl_server_credentials(
        [(old.worker.key.read_bytes(), old.worker.chain.read_bytes())], old.worker.ca.read_bytes(), True
    )
    server = await start_server("127.0.0.1:0", [], credentials=lambda: expired)
    assert may_be_tls(await failure(server.address, gateway))
    assert await asyncio.to_thread(refusal_cause, server.address, pool.gateway) == "its certificate has expired"
    await server.stop(0)
    async with serving(PoolTls(pool.worker, is_worker=True)) as valid:
        cause = await asyncio.to_thread(refusal_cause, valid.address, old.gateway)
        assert "does not accept the certificate of this process" in cause
        assert f"{old.gateway.chain} has expired" in cause


async def test_a_gateways_certificate_is_refused_for_a_worker(tmp_path: Path) -> None:
    pool = pool_in(tmp_path, "pool")
    gateway = PoolTls(pool.gateway, is_worker=False)
    async with serving(gateway) as server:
        assert may_be_tls(await failure(server.address, gateway))
        cause = await asyncio.to_thread(refusal_cause, server.address, pool.gateway)
        assert cause == "its certificate does not have the name worker.kvferry, which workers need"


async def test_a_plain_server_is_named(tmp_path: Path) -> None:
    pool = pool_in(tmp_path, "pool")
    async with serving(None) as server:
        assert may_be_tls(await failure(server.address, PoolTls(pool.gateway, is_worker=False)))
        assert "does not use TLS" in await asyncio.to_thread(refusal_cause, server.address, pool.gateway)
        assert await asyncio.to_thread(refusal_cause, server.address, None) == ""
    assert await asyncio.to_thread(refusal_cause, server.address, pool.gateway) == ""  # no server listens
    assert not may_be_tls("failed to connect to all addresses; last error: Connection refused")


async def test_the_ca_is_rotated_in_stages_without_a_pause(tmp_path: Path) -> None:
    old, new = an_authority("old"), an_authority("new")
    pool = pool_in(tmp_path, "pool", old)
    before = pool_in(tmp_path, "before", old)
    worker, gateway = PoolTls(pool.worker, is_worker=True), PoolTls(pool.gateway, is_worker=False)
    async with serving(worker) as server, open_channel(server.address, gateway) as first:
        health = health_pb2_grpc.HealthStub(first)
        watching = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watching.read()).status == SERVING
        stages = [lambda: pool.trust(old, new), lambda: (pool.issue("worker", new), pool.issue("gateway", new))]
        for change in (*stages, lambda: pool.trust(new)):
            change()
            # Each of the two processes may be the first to read its files.
            for renewed in (gateway, worker):
                assert renewed.renew()
                assert not renewed.renew()
                async with open_channel(server.address, gateway) as channel:
                    assert await check(channel) == SERVING
        assert worker.generation == gateway.generation == 3
        # New connections with a certificate of the old CA are refused, while open connections continue.
        assert await failure(server.address, PoolTls(before.gateway, is_worker=False))
        assert await check(first) == SERVING
        await server.set_ready(False)
        assert (await watching.read()).status != SERVING
        watching.cancel()


async def test_invalid_renewals_are_ignored_until_they_are_valid(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = an_authority()
    pool = pool_in(tmp_path, "pool", authority)
    worker = PoolTls(pool.worker, is_worker=True)
    ends = worker.not_after
    pool.issue("worker", authority, age_days=20)
    assert not worker.renew()
    assert not worker.renew()
    assert sum("has expired" in line for line in caplog.messages) == 1, "the same cause is logged once"
    pool.worker.key.unlink()
    assert not worker.renew()
    assert (worker.generation, worker.not_after) == (0, ends)
    pool.issue("worker", authority, days=20)
    assert worker.renew()
    assert worker.not_after > ends
    async with serving(worker) as server, open_channel(server.address, worker) as channel:
        assert await check(channel) == SERVING


async def test_health_is_served_without_tls_from_the_same_statuses(tmp_path: Path) -> None:
    pool = pool_in(tmp_path, "pool")
    async with serving(PoolTls(pool.worker, is_worker=True)) as work:
        plain = await start_server("127.0.0.1:0", [], statuses=work.statuses)
        await work.set_ready(True)
        async with open_channel(plain.address) as channel:
            assert await check(channel) == SERVING
            await work.set_ready(False)
            assert await check(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        await plain.stop(0)


async def test_a_server_that_grpc_has_ended_serves_tls_again(tmp_path: Path, monkeypatch, caplog) -> None:
    """Its replacement needs new credentials."""
    pool = pool_in(tmp_path, "pool")
    worker, gateway = PoolTls(pool.worker, is_worker=True), PoolTls(pool.gateway, is_worker=False)

    def fail(*_: object) -> None:
        raise RuntimeError("no calls")

    async with serving(worker) as server:
        with monkeypatch.context() as patch:
            patch.setattr("kvferry.rpc.unknown_methods._Core._make_request_call_future", fail)
            async with open_channel(server.address, gateway) as channel:
                with suppress(grpc.RpcError):  # the server's loop ends with this call
                    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        async with open_channel(server.address, gateway) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS, wait_for_ready=True)
            assert answer.status == SERVING
    assert "started again" in caplog.text
