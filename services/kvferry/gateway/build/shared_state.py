"""The parts of a gateway whose state all gateways of a pool share."""

from dataclasses import dataclass

from kvferry.core.clock import Clock
from kvferry.core.errors import UsageError
from kvferry.gateway.admission.quota_sync import QuotaSync
from kvferry.gateway.decide.config import GatewayConfig, StateConfig, StoreLimits
from kvferry.gateway.http.responses.shared_store import SharedResponses
from kvferry.gateway.observe.instruments import GatewayInstruments
from kvferry.gateway.resume.resumption import StreamResumption
from kvferry.gateway.resume.stream_records import StreamRecords
from kvferry.gateway.resume.stream_store import RecordLimits, StreamStore
from kvferry.gateway.state.pool_seal import PoolSeal
from kvferry.gateway.state.state_client import StateClient
from kvferry.gateway.state.state_url import parse_state_url


@dataclass(frozen=True, slots=True)
class SharedState:
    """The parts of a gateway whose state all gateways of the pool share."""

    client: StateClient
    resumption: StreamResumption
    """Records and continues streams."""
    quotas: QuotaSync
    responses: SharedResponses


def build_shared(
    config: GatewayConfig, state: StateConfig, clock: Clock, instruments: GatewayInstruments, gateway: str
) -> SharedState:
    """Return what the gateways of the pool share.

    Raises:
        UsageError: the URL is malformed, a package is missing, or the pool has no key.
    """
    server = parse_state_url(state.url)
    if not config.tenant_key:
        raise UsageError(
            "--state needs the pool's key, with which records are sealed; set --tenant-key-file to the same file for "
            "all gateways",
            field="tenant_key",
        )
    seal = PoolSeal(config.tenant_key)
    client = StateClient(server, lambda part, outcome: instruments.state_calls.labels(part, outcome).inc())
    records = StreamRecords(StreamStore(client, seal.pool, RecordLimits(state.total_bytes)), clock, instruments)
    return SharedState(
        client,
        StreamResumption(records, seal, clock, instruments, config.retry.request_timeout_seconds),
        QuotaSync(client, seal, gateway, clock, instruments),
        SharedResponses(
            client,
            seal,
            gateway,
            StoreLimits(tenant_bytes=state.total_bytes // 8, total_bytes=state.total_bytes),
            clock,
            on_failure=lambda reason: instruments.response_store_failures.labels(reason).inc(),
        ),
    )
