"""Calls `WorkerAdmin.Profile`, which records the steps of a worker."""

from dataclasses import dataclass

import grpc

from kvferry.core.errors import InvariantBroken, UsageError
from kvferry.rpc.access.call_keys import CallSigner, role_key
from kvferry.rpc.access.signed_channel import signed_blocking
from kvferry.rpc.access.table import CallerRole
from kvferry.rpc.channel import open_blocking_channel
from kvferry.rpc.errors import error_from_rpc
from kvferry.rpc.tls.certificate_files import CertificateFiles
from kvferry.rpc.tls.pool_tls import PoolTls
from kvferry.v1 import worker_admin_pb2, worker_admin_pb2_grpc

_MAX_BYTES = 1 << 30
_GRACE_SECONDS = 60.0
"""Seconds allowed for writing and sending a recording after the worker's timeout."""


@dataclass(frozen=True, slots=True)
class Profiled:
    """Recorded steps of a worker."""

    trace: bytes
    """Trace in Chrome's JSON format."""
    log: bytes
    """Step log, as JSON lines."""


def profile_worker(
    address: str,
    ticket_key: bytes,
    tls: CertificateFiles | None,
    *,
    steps: int,
    timeout_seconds: float,
    resets_cache: bool,
    has_tokens: bool,
) -> Profiled:
    """Record steps of a worker.

    Args:
        address: `host:port` of WorkerAdmin.
        ticket_key: the pool's ticket key, from which the operator's call key is derived.
        tls: certificate, key and CA of the pool; `None` for plain connections.
        steps: number of steps to record.
        timeout_seconds: maximum time in seconds to wait for them.
        resets_cache: whether to empty the prefix cache first.
        has_tokens: whether the log contains token ids.

    Raises:
        UsageError: the address is not `host:port`.
        KvferryError: the call failed.
        InvariantBroken: the recording is too large.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"{address!r} is not an address; use host:port of the worker's --admin", field="address")
    pool_tls = None if tls is None else PoolTls(tls, is_worker=False)
    signer = CallSigner(CallerRole.OPERATOR, role_key(ticket_key, CallerRole.OPERATOR))
    request = worker_admin_pb2.ProfileRequest(
        steps=steps, timeout_seconds=timeout_seconds, reset_prefix_cache=resets_cache, tokens=has_tokens
    )
    trace, log = bytearray(), bytearray()
    with open_blocking_channel(address, pool_tls) as channel:
        stub = worker_admin_pb2_grpc.WorkerAdminStub(signed_blocking(channel, signer, address))
        try:
            for part in stub.Profile(request, timeout=timeout_seconds + _GRACE_SECONDS):
                trace += part.trace
                log += part.log
                if len(trace) + len(log) > _MAX_BYTES:
                    raise InvariantBroken(f"{address} sent more than {_MAX_BYTES} bytes")
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
    return Profiled(bytes(trace), bytes(log))
