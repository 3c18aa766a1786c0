"""Implements `PeerControl` over gRPC: control messages to other workers (describe, claim, renew, finish)."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from kvferry.core.ids import TicketId
from kvferry.kv.interface.connector import Peer
from kvferry.kv.interface.seals import AddressSeal
from kvferry.kv.interface.ticket import Keyring
from kvferry.kv.pages.layout import KvLayout
from kvferry.rpc.access.call_keys import CallSigner
from kvferry.rpc.access.signed_channel import signed_blocking
from kvferry.rpc.channel import open_blocking_channel
from kvferry.rpc.errors import error_from_rpc
from kvferry.rpc.tls.pool_tls import PoolTls
from kvferry.v1 import common_pb2, kv_transfer_pb2, kv_transfer_pb2_grpc
from kvferry.workers.handoff.peer_layouts import check_peer_pages, layout_to_wire

_MAX_CHANNELS = 256
"""Maximum number of open channels; the oldest channel is closed first."""


@dataclass(slots=True)
class _PeerChannel:
    """A channel to a peer. Once new calls use another channel, it is closed after its last call."""

    channel: grpc.Channel
    stub: kv_transfer_pb2_grpc.KvTransferStub
    generation: int
    """Generation of the certificate with which it was opened."""
    num_calls: int = 0
    is_replaced: bool = False


class GrpcPeerControl:
    """Sends control messages to peers over one channel per address. Thread-safe."""

    def __init__(
        self,
        identity: Callable[[], common_pb2.WorkerIdentity],
        signer: CallSigner,
        keyring: Keyring,
        tls: PoolTls | None = None,
    ) -> None:
        """
        Args:
            identity: function that returns this worker's identity; called for each message, since it is set only when
                the server is bound.
            signer: creates the tokens for this worker's calls.
            keyring: checks that peers' messages were sealed with the pool's key.
            tls: TLS of the pool; `None` for plain connections.
        """
        self._tls = tls
        self._identity = identity
        self._signer = signer
        self._keyring = keyring
        self._peers: dict[str, _PeerChannel] = {}
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
        for peer in peers:
            peer.channel.close()

    def _call(self, peer: Peer, method: str, request: object, timeout: float) -> Any:
        try:
            with self._stub(peer.control_address) as stub:
                return getattr(stub, method)(request, timeout=timeout)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error

    @contextmanager
    def _stub(self, address: str) -> Iterator[kv_transfer_pb2_grpc.KvTransferStub]:
        """Return the stub for one call. After a renewal of this worker's certificate, a new channel is opened."""
        with self._lock:
            used = self._peers.get(address)
            generation = 0 if self._tls is None else self._tls.generation
            if used is None or used.generation != generation:
                self._replace(address)
                if len(self._peers) >= _MAX_CHANNELS:
                    self._replace(next(iter(self._peers)))
                channel = open_blocking_channel(address, self._tls)
                stub = kv_transfer_pb2_grpc.KvTransferStub(signed_blocking(channel, self._signer, address))
                used = self._peers[address] = _PeerChannel(channel, stub, generation)
            used.num_calls += 1
        try:
            yield used.stub
        finally:
            with self._lock:
                used.num_calls -= 1
                is_last = used.is_replaced and not used.num_calls
            if is_last:
                used.channel.close()

    def _replace(self, address: str) -> None:
        """Drop the channel to `address`; its calls are finished first."""
        replaced = self._peers.pop(address, None)
        if replaced is not None:
            replaced.is_replaced = True
            if not replaced.num_calls:
                replaced.channel.close()
