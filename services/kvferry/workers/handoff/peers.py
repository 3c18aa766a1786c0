"""Implements `PeerControl` over gRPC: control messages to other workers (describe, claim, renew, finish)."""

import threading
from collections.abc import Callable
from typing import Any

import grpc

from kvferry.core.ids import TicketId
from kvferry.kv.interface.connector import Peer
from kvferry.kv.pages.layout import KvLayout
from kvferry.rpc.channel import open_blocking_channel
from kvferry.rpc.errors import error_from_rpc
from kvferry.v1 import common_pb2, kv_transfer_pb2, kv_transfer_pb2_grpc
from kvferry.workers.handoff.peer_layouts import check_peer_pages, layout_to_wire

_MAX_CHANNELS = 256
"""Maximum number of open channels; the oldest channel is closed first."""


class GrpcPeerControl:
    """Sends control messages to peers over one channel per address. Thread-safe."""

    def __init__(self, identity: Callable[[], common_pb2.WorkerIdentity]) -> None:
        """
        Args:
            identity: function that returns this worker's identity; called for each message, since it is set only when
                the server is bound.
        """
        self._identity = identity
        self._channels: dict[str, grpc.Channel] = {}
        self._lock = threading.Lock()  # guards _channels; opening a channel does not block

    def describe(self, peer: Peer, connector: str, layout: KvLayout, timeout: float) -> bytes:
        request = kv_transfer_pb2.DescribeRequest(
            reader=self._identity(),
            incarnation=peer.incarnation,
            connector=connector,
            fingerprint=layout.fingerprint,
            layout=layout_to_wire(layout),
        )
        answer = self._call(peer, "Describe", request, timeout)
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
            channels = list(self._channels.values())
            self._channels.clear()
        for channel in channels:
            channel.close()

    def _call(self, peer: Peer, method: str, request: object, timeout: float) -> Any:
        with self._lock:
            channel = self._channels.get(peer.control_address)
            if channel is None:
                if len(self._channels) >= _MAX_CHANNELS:
                    self._channels.pop(next(iter(self._channels))).close()
                channel = self._channels[peer.control_address] = open_blocking_channel(peer.control_address)
        try:
            return getattr(kv_transfer_pb2_grpc.KvTransferStub(channel), method)(request, timeout=timeout)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
