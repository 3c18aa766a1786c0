"""Implements `PeerControl` over gRPC: control messages to other workers (describe, claim, renew, finish)."""

import threading
from collections.abc import Callable
from typing import Any

import grpc

from kvferry.core.ids import TicketId
from kvferry.kv.handoff.seals import AddressSeal
from kvferry.kv.handoff.ticket import Keyring
from kvferry.kv.interface.connector import Peer
from kvferry.kv.pages.layout import KvLayout
from kvferry.rpc.access.call_keys import CallSigner
from kvferry.rpc.access.signed_channel import signed_blocking
from kvferry.rpc.channel import open_blocking_channel
from kvferry.rpc.errors import error_from_rpc
from kvferry.v1 import common_pb2, kv_transfer_pb2, kv_transfer_pb2_grpc
from kvferry.workers.handoff.peer_layouts import check_peer_pages, layout_to_wire

_MAX_CHANNELS = 256
"""Maximum number of open channels; the oldest channel is closed first."""


class GrpcPeerControl:
    """Sends control messages to peers over one channel per address. Thread-safe."""

    def __init__(self, identity: Callable[[], common_pb2.WorkerIdentity], signer: CallSigner, keyring: Keyring) -> None:
        """
        Args:
            identity: function that returns this worker's identity; called for each message, since it is set only when
                the server is bound.
            signer: makes the tokens of this worker's calls.
            keyring: checks that peers' messages were sealed with the pool's key.
        """
        self._identity = identity
        self._signer = signer
        self._keyring = keyring
        self._peers: dict[str, tuple[grpc.Channel, kv_transfer_pb2_grpc.KvTransferStub]] = {}
        self._lock = threading.Lock()  # guards _peers; opening a channel does not block

    def describe(self, peer: Peer, connector: str, layout: KvLayout, timeout: float) -> bytes:
        request = kv_transfer_pb2.DescribeRequest(
            reader=self._identity(),
            incarnation=peer.incarnation,
            connector=connector,
            fingerprint=layout.fingerprint,
            layout=layout_to_wire(layout),
        )
        answer = self._call(peer, "Describe", request, timeout)
        sealed = AddressSeal(peer.incarnation, connector, answer.fingerprint, answer.address)
        self._keyring.check(sealed, answer.seal)
        check_peer_pages(answer.fingerprint, answer.layout, layout)
        return bytes(answer.address)

    def claim(self, peer: Peer, ticket_id: TicketId, attempt: int, timeout: float, *, reader: int = 0) -> float:
        request = kv_transfer_pb2.ClaimRequest(
            ticket_id=ticket_id,
            attempt=attempt,
            incarnation=peer.incarnation,
            reader=self._identity(),
            reader_index=reader,
        )
        return float(self._call(peer, "Claim", request, timeout).lease_seconds)

    def renew(self, peer: Peer, ticket_id: TicketId, attempt: int, timeout: float, *, reader: int = 0) -> float:
        request = kv_transfer_pb2.RenewRequest(
            ticket_id=ticket_id, attempt=attempt, incarnation=peer.incarnation, reader_index=reader
        )
        return float(self._call(peer, "Renew", request, timeout).lease_seconds)

    def finish(
        self, peer: Peer, ticket_id: TicketId, attempt: int, timeout: float, *, done: bool, reader: int = 0
    ) -> None:
        outcomes = kv_transfer_pb2.FinishRequest.Outcome
        outcome = outcomes.OUTCOME_DONE if done else outcomes.OUTCOME_FAILED
        request = kv_transfer_pb2.FinishRequest(
            ticket_id=ticket_id,
            attempt=attempt,
            incarnation=peer.incarnation,
            outcome=outcome,
            reader_index=reader,
        )
        self._call(peer, "Finish", request, timeout)

    def close(self) -> None:
        """Close all channels; calls in flight fail with UNAVAILABLE."""
        with self._lock:
            peers = list(self._peers.values())
            self._peers.clear()
        for channel, _ in peers:
            channel.close()

    def _call(self, peer: Peer, method: str, request: object, timeout: float) -> Any:
        try:
            return getattr(self._stub(peer.control_address), method)(request, timeout=timeout)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error

    def _stub(self, address: str) -> kv_transfer_pb2_grpc.KvTransferStub:
        with self._lock:
            if address not in self._peers:
                if len(self._peers) >= _MAX_CHANNELS:
                    self._peers.pop(next(iter(self._peers)))[0].close()
                channel = open_blocking_channel(address)
                stub = kv_transfer_pb2_grpc.KvTransferStub(signed_blocking(channel, self._signer, address))
                self._peers[address] = channel, stub
            return self._peers[address][1]
