"""State shared by a worker's services: identity, model, layout, readiness and draining."""

from dataclasses import dataclass
from uuid import uuid4

from kvferry.core.clock import Clock
from kvferry.core.errors import InvalidRequest, Unavailable, UnknownModel, shortened
from kvferry.core.hashing import ADAPTER_DIGEST_CHARS, SALT_DIGEST_CHARS
from kvferry.core.ids import Incarnation, RequestId, WorkerId
from kvferry.core.traces.spans import Tracer
from kvferry.engine.loop.engine_loop import EngineLoop
from kvferry.kv.pages.layout import KvLayout
from kvferry.v1 import common_pb2

_UNBOUND = WorkerId("")
MAX_SCOPE_CHARS = 256 + SALT_DIGEST_CHARS + ADAPTER_DIGEST_CHARS
"""Maximum length of a scope: a tenant with the digests of salt and adapter (`core.hashing.cache_scope`)."""


@dataclass(slots=True)
class UnitIdentity:
    """Identity of a worker unit. Its id and address are known once its server is bound."""

    incarnation: Incarnation
    worker_id: WorkerId = _UNBOUND
    address: str = ""
    """`host:port` under which peers reach the unit's services."""

    def bind(self, worker_id: WorkerId, address: str) -> None:
        """Set the id and the address."""
        self.worker_id, self.address = worker_id, address

    def message(self) -> common_pb2.WorkerIdentity:
        """Return id and incarnation as a message."""
        return common_pb2.WorkerIdentity(worker_id=self.worker_id, incarnation=self.incarnation)


@dataclass(slots=True)
class WorkerContext:
    """State shared by the services of an engine; `ready` and `draining` change later."""

    unit: UnitIdentity
    role: str
    model: str
    layout: KvLayout
    """Layout of the KV; it changes with the weights."""
    connector: str
    domain: str
    """Transport domain of the worker; see `Transport.domain`."""
    max_model_tokens: int
    loop: EngineLoop
    clock: Clock
    max_sequences: int = 0
    """Maximum number of sequences in the running batch; 0 if it is not known."""
    device: str = ""
    """`cpu`, or the name of the GPU; empty if it is not known."""
    is_staged: bool = False
    """Whether peers and tiers access KV through a mirror in host memory."""
    tracer: Tracer | None = None
    """Traces the calls whose callers trace them; `None` if traces are off."""
    ready: bool = False
    """Whether the warm-up has produced a token."""
    draining: bool = False
    """Whether new requests are rejected; running requests continue."""

    @property
    def identity(self) -> common_pb2.WorkerIdentity:
        """The worker's id and incarnation as a message."""
        return self.unit.message()

    @property
    def incarnation(self) -> Incarnation:
        """Incarnation of the worker."""
        return self.unit.incarnation

    @property
    def worker_id(self) -> WorkerId:
        """The worker's id."""
        return self.unit.worker_id

    @property
    def address(self) -> str:
        """`host:port` under which peers reach this worker's services."""
        return self.unit.address

    def deadline_in(self, seconds: float | None) -> float | None:
        """Return the deadline of a call that ends in `seconds`, in monotonic seconds; `None` without a deadline."""
        return None if seconds is None else self.clock.monotonic() + seconds

    def admit(self, model: str, scope: str = "") -> None:
        """Check that a call with this model and scope may start.

        Args:
            model: name of the model; empty matches every model.
            scope: cache scope of the call; empty if the call has none.

        Raises:
            InvalidRequest: the scope is too long.
            Unavailable: the worker is draining.
            UnknownModel: the worker serves a different model; an empty name matches every model.
        """
        self.check_scope(scope)
        if self.draining:
            raise Unavailable(
                "this worker is draining; retry on a different worker", reason="DRAINING", retry_after_seconds=0.1
            )
        if model not in {"", self.model}:
            raise UnknownModel(f"model {shortened(model)!r} is not served here; use {self.model!r}", field="model")

    def check_scope(self, scope: str) -> None:
        """Check the length of a cache scope.

        Raises:
            InvalidRequest: the scope is too long.
        """
        if len(scope) > MAX_SCOPE_CHARS:
            raise InvalidRequest(
                f"scope has {len(scope)} characters; at most {MAX_SCOPE_CHARS} are accepted", field="scope"
            )


def sequence_id(request_id: str, sample_index: int) -> RequestId:
    """Create a request id that is unique in the engine, even if a client reuses request ids.

    Args:
        request_id: id that the client has chosen.
        sample_index: index of the sample in the request.
    """
    return RequestId(f"{request_id}/{sample_index}/{uuid4().hex[:8]}")
