"""The parts of a gateway that keep files and run batches."""

from starlette.types import ASGIApp

from kvferry.core.clock import Clock
from kvferry.core.errors import UsageError
from kvferry.gateway.admission.flow_gate import FlowGate
from kvferry.gateway.admission.tenants import Tenants
from kvferry.gateway.batches.batch_run import RunParts
from kvferry.gateway.batches.batch_runner import BatchRunner
from kvferry.gateway.batches.batch_service import BatchService
from kvferry.gateway.batches.folder import BatchFolder
from kvferry.gateway.batches.line_slots import LineSlots
from kvferry.gateway.batches.shared.shared_calls import SharedCalls
from kvferry.gateway.batches.shared.shared_storage import SharedStorage
from kvferry.gateway.batches.storage import BatchStorage
from kvferry.gateway.decide.config import BatchConfig, GatewayConfig
from kvferry.gateway.http.batches.inner_call import InnerCall
from kvferry.gateway.observe.instruments import GatewayInstruments
from kvferry.gateway.state.blocking_client import BlockingStateClient
from kvferry.gateway.state.pool_seal import PoolSeal
from kvferry.gateway.state.state_url import parse_state_url
from kvferry.serving.text_service import TextService

_MAX_LINES = 256
"""Maximum number of lines of batches that run at a time, if no setting has another one."""


def build_batch_service(
    config: GatewayConfig, clock: Clock, instruments: GatewayInstruments, gateway: str
) -> BatchService | None:
    """Return the service of files and batches; `None` if they are off."""
    if config.batches is None:
        return None
    return BatchService(_storage(config, config.batches, clock, instruments, gateway), config.batches, clock)


def _storage(
    config: GatewayConfig, batches: BatchConfig, clock: Clock, instruments: GatewayInstruments, gateway: str
) -> BatchStorage:
    """Return what keeps files and batches.

    Raises:
        UsageError: no folder is set, and no state.
    """
    if batches.folder is not None:
        return BatchFolder(batches.folder)
    if config.state is None:
        raise UsageError("batch_folder is 'state', which needs --state redis://HOST:6379/0", field="batch_folder")
    client = BlockingStateClient(
        parse_state_url(config.state.url),
        clock,
        "files",
        lambda part, outcome: instruments.state_calls.labels(part, outcome).inc(),
    )
    calls = SharedCalls(
        client,
        PoolSeal(config.tenant_key),
        gateway,
        config.state.file_bytes,
        clock,
        on_failure=lambda reason: instruments.file_store_failures.labels(reason).inc(),
    )
    return SharedStorage(calls, client.close)


def build_batch_runner(
    batches: BatchService,
    service: TextService,
    client_app: ASGIApp,
    gate: FlowGate,
    tenants: Tenants,
    instruments: GatewayInstruments,
) -> BatchRunner:
    """Return what runs the batches; lines take the way of requests of their tenants."""

    def check_model(tenant: str, name: str) -> None:
        adapter = service.adapter_of(name)
        service.check_access(tenant, service.model.name if adapter is None else adapter.name)

    def tenant_lines(tenant: str) -> int:
        most = tenants.policy(tenant).concurrent_requests
        return _MAX_LINES if most is None else max(1, most // 2)

    given = batches.config.lines
    parts = RunParts(
        batches.storage,
        batches.config,
        service.clock,
        LineSlots(lambda: given or max(1, min(_MAX_LINES, gate.room.now().sequences // 2))),
        InnerCall(client_app),
        check_model=check_model,
        has_tenant=lambda tenant: not tenants.keys.are_required or tenant in tenants.keys.tenants,
        tenant_lines=tenant_lines,
        on_line=lambda outcome: instruments.batch_lines.labels(outcome).inc(),
        on_state=lambda state: instruments.batches.labels(state.value).inc(),
    )
    return BatchRunner(parts, batches.changed)
