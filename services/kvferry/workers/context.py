"""What all services of one worker share: who it is, what it serves, and whether it takes work."""

from dataclasses import dataclass
from uuid import uuid4

from kvferry.core.clock import Clock
from kvferry.core.errors import InvalidRequest, Unavailable, UnknownModel
from kvferry.core.ids import Incarnation, RequestId, WorkerId
from kvferry.kv.layout import KvLayout
from kvferry.v1 import common_pb2
from kvferry.workers.loop import EngineLoop

_UNBOUND = WorkerId("")
MAX_TENANT_CHARS = 256


@dataclass(slots=True)
class WorkerContext:
    """One engine's surroundings. The last four change: the first two of them once, when the server is bound."""

    incarnation: Incarnation
    role: str
    model: str
    model_digest: str
    layout: KvLayout
    connector: str
    domain: str
    """See `Transport.domain`."""
    max_model_tokens: int
    loop: EngineLoop
    clock: Clock
    worker_id: WorkerId = _UNBOUND
    address: str = ""
    """`host:port` under which peers reach this worker's services."""
    ready: bool = False
    """A token was really produced."""
    draining: bool = False
    """New work is refused; running work goes on."""

    @property
    def identity(self) -> common_pb2.WorkerIdentity:
        """As a message."""
        return common_pb2.WorkerIdentity(worker_id=self.worker_id, incarnation=self.incarnation)

    def admit(self, model: str, tenant: str = "") -> None:
        """Whether a call may start.

        Raises:
            InvalidRequest: the tenant's name is too long to be one.
            Unavailable: the worker is draining.
            UnknownModel: it serves another model; an empty name means the one there is.
        """
        if len(tenant) > MAX_TENANT_CHARS:
            raise InvalidRequest(
                f"tenant has {len(tenant)} characters; at most {MAX_TENANT_CHARS} are accepted", field="tenant"
            )
        if self.draining:
            raise Unavailable("this worker is draining; ask another", reason="DRAINING", retry_after_seconds=0.1)
        if model not in {"", self.model}:
            raise UnknownModel(f"model {model!r} is not served here; this worker serves {self.model!r}", field="model")


def sequence_id(request_id: str, sample_index: int) -> RequestId:
    """An id for the engine that no other call has, even if a client uses a request id twice."""
    return RequestId(f"{request_id}/{sample_index}/{uuid4().hex[:8]}")
