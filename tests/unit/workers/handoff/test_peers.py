"""A worker's channels to its peers across renewals of its certificate."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from harness.servers.pool_certificates import PoolFolder, an_authority
from harness.servers.worker_channel import signer_of

from kvferry.core.ids import Incarnation, TicketId, WorkerId
from kvferry.kv.interface.connector import Peer
from kvferry.kv.interface.ticket import Keyring
from kvferry.rpc.access.table import CallerRole
from kvferry.rpc.tls.pool_tls import PoolTls
from kvferry.v1 import common_pb2, kv_transfer_pb2, kv_transfer_pb2_grpc
from kvferry.workers.handoff.peers import GrpcPeerControl

SECONDS = 20.0
TICKET = TicketId("0" * 32)


class SlowPeer(kv_transfer_pb2_grpc.KvTransferServicer):
    """A peer that answers renewals of leases when the test allows it."""

    def __init__(self) -> None:
        self.called, self.may_answer = threading.Event(), threading.Event()
        self.peers: list[str] = []

    def Renew(self, request: Any, context: Any) -> kv_transfer_pb2.RenewResponse:
        self.peers.append(context.peer())
        self.called.set()
        assert self.may_answer.wait(SECONDS)
        return kv_transfer_pb2.RenewResponse(lease_seconds=3)


def test_a_call_in_flight_survives_a_renewal_and_later_calls_use_the_new_certificate(tmp_path: Path) -> None:
    authority = an_authority()
    pool = PoolFolder(tmp_path, authority)
    tls, served = PoolTls(pool.worker, is_worker=True), SlowPeer()
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        kv_transfer_pb2_grpc.add_KvTransferServicer_to_server(served, server)
        port = server.add_secure_port("127.0.0.1:0", tls.server_credentials())
        server.start()
        control = GrpcPeerControl(common_pb2.WorkerIdentity, signer_of(CallerRole.WORKER), Keyring([b"t" * 32]), tls)
        peer = Peer(WorkerId("w"), Incarnation("1" * 16), f"127.0.0.1:{port}")

        def renew() -> float:
            return control.renew(peer, TICKET, 0, SECONDS)

        with ThreadPoolExecutor(2) as callers:
            first = callers.submit(renew)
            assert served.called.wait(SECONDS)
            pool.issue("worker", authority, days=20)
            assert tls.renew()
            second = callers.submit(renew)
            served.called.clear()
            assert served.called.wait(SECONDS)
            served.may_answer.set()
            assert (first.result(SECONDS), second.result(SECONDS)) == (3, 3)
        assert len(set(served.peers)) == 2, "the second call opened another connection"
        assert renew() == 3
        assert len(set(served.peers)) == 2, "later calls use this connection"
        control.close()
        server.stop(None).wait()


def test_a_peer_without_a_certificate_is_not_called(tmp_path: Path) -> None:
    pool, other = PoolFolder(tmp_path, an_authority()), tmp_path / "other"
    other.mkdir()
    stranger = PoolTls(PoolFolder(other, an_authority()).worker, is_worker=True)
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        kv_transfer_pb2_grpc.add_KvTransferServicer_to_server(SlowPeer(), server)
        port = server.add_secure_port("127.0.0.1:0", stranger.server_credentials())
        server.start()
        tls = PoolTls(pool.worker, is_worker=True)
        control = GrpcPeerControl(common_pb2.WorkerIdentity, signer_of(CallerRole.WORKER), Keyring([b"t" * 32]), tls)
        with pytest.raises(Exception, match=r"(?i)certificate|handshake") as caught:
            control.renew(Peer(WorkerId("w"), Incarnation("1" * 16), f"127.0.0.1:{port}"), TICKET, 0, SECONDS)
        assert getattr(caught.value, "reason", "")
        control.close()
        server.stop(None).wait()
