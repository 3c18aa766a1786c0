"""Polls the resources in use by workers during a fault, and the failure counters of their tiers."""

import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self

import grpc

from harness.servers.worker_channel import worker_channel
from kvferry.v1 import worker_admin_pb2, worker_admin_pb2_grpc

_LOOK_SECONDS = 0.1
_ANSWER_SECONDS = 1.0
_JOIN_SECONDS = 30.0


def status(address: str) -> worker_admin_pb2.StatusResponse | None:
    """Return a worker's status; `None` if the worker does not respond within a second."""
    with worker_channel(address) as channel, suppress(grpc.RpcError):
        stub = worker_admin_pb2_grpc.WorkerAdminStub(channel)
        return stub.Status(worker_admin_pb2.StatusRequest(), timeout=_ANSWER_SECONDS)
    return None


def tier_failures(addresses: Iterable[str], tier: str) -> int:
    """Return the sum of the workers' failure counters of `tier`."""
    answers = [answer for address in addresses if (answer := status(address)) is not None]
    return sum(one.failures for answer in answers for one in answer.tiers if one.name == tier)


class Watch:
    """Context manager that polls all workers; `most` has, by resource, the maximum of the sum over all workers."""

    def __init__(self, addresses: Iterable[str]) -> None:
        """
        Args:
            addresses: `host:port` of each WorkerAdmin.
        """
        self._addresses = tuple(addresses)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self.most: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join(_JOIN_SECONDS)

    def _look(self) -> None:
        with ExitStack() as stack:
            channels = [stack.enter_context(worker_channel(address)) for address in self._addresses]
            stubs = [worker_admin_pb2_grpc.WorkerAdminStub(channel) for channel in channels]
            while not self._ends.wait(_LOOK_SECONDS):
                now: Counter[str] = Counter()
                for stub in stubs:
                    with suppress(grpc.RpcError):  # frozen or not running
                        now += _held(stub.Status(worker_admin_pb2.StatusRequest(), timeout=_ANSWER_SECONDS).load)
                self.most |= now


def _held(load: worker_admin_pb2.WorkerLoad) -> Counter[str]:
    return Counter(
        {
            "pages in quarantine": load.blocks_quarantined,
            "tickets": load.tickets_offered + load.tickets_claimed,
            "transfers": load.transfers,
            "stores": load.stores,
        }
    )
