"""Parser of a gateway's response to `GET /fleet`. Responses are untrusted, since users choose the gateway image.
Pure."""

from typing import Annotated

import msgspec

from kvferry.core.handoffs import HandoffOutcome
from kvferry.core.load import WorkerLoad
from kvferry.operator.pool.facts import FleetReport, GatewayQueue, WorkerReport

MAX_BYTES = 4 << 20
_MAX_WORKERS = 5000
_MAX_ADAPTERS = 5000
_Text = Annotated[str, msgspec.Meta(max_length=512)]
_Reason = Annotated[str, msgspec.Meta(max_length=4096)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


class _Load(msgspec.Struct):
    running: _Count = 0
    waiting: _Count = 0
    loading: _Count = 0
    blocks_total: _Count = 0
    blocks_free: _Count = 0
    tickets_offered: _Count = 0
    tickets_claimed: _Count = 0


class _Adapter(msgspec.Struct):
    name: _Text
    digest: _Text


class _Worker(msgspec.Struct):
    name: _Text
    role: _Text
    takes_work: bool = False
    why_not: _Reason = ""
    fingerprint: _Text = ""
    family: _Text = ""
    connector: _Text = ""
    model_digest: _Text = ""
    context_tokens: _Count = 0
    device: _Text = ""
    staged: bool = False
    adapters: Annotated[list[_Adapter], msgspec.Meta(max_length=_MAX_ADAPTERS)] = []
    adapter_failures: Annotated[dict[_Text, _Reason], msgspec.Meta(max_length=_MAX_ADAPTERS)] = {}
    in_flight: _Count = 0
    load: _Load = msgspec.field(default_factory=_Load)


class _Capacity(msgspec.Struct):
    in_use: _Count = 0
    bound: _Count | None = None


class _Flow(msgspec.Struct):
    queued: _Count = 0
    queued_prompt_tokens: _Count = 0
    sequences: _Capacity = msgspec.field(default_factory=_Capacity)
    prefill_tokens: _Capacity = msgspec.field(default_factory=_Capacity)


class _Page(msgspec.Struct):
    workers: Annotated[list[_Worker], msgspec.Meta(max_length=_MAX_WORKERS)]
    gateway: _Text = ""
    held: _Count = 0
    model_tokens: _Count = 0
    pool_certificate_not_after: _Count = 0
    handoffs: Annotated[dict[_Text, _Count], msgspec.Meta(max_length=64)] = {}
    flow: _Flow = msgspec.field(default_factory=_Flow)


_DECODER = msgspec.json.Decoder(_Page)


def read_fleet(raw: bytes, at: float) -> FleetReport:
    """Parse a response of at most `MAX_BYTES`, read at time `at`.

    Raises:
        ValueError: the response is not a fleet report.
    """
    try:
        page = _DECODER.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not a fleet report: {error}") from error
    handoffs = {outcome.value: page.handoffs[outcome] for outcome in HandoffOutcome if outcome in page.handoffs}
    workers = tuple(_report(worker) for worker in page.workers)
    return FleetReport(
        at,
        workers,
        page.held,
        handoffs,
        page.gateway,
        page.model_tokens,
        page.pool_certificate_not_after,
        _queue(page.flow),
    )


def _queue(flow: _Flow) -> GatewayQueue:
    return GatewayQueue(
        requests=flow.queued,
        prompt_tokens=flow.queued_prompt_tokens,
        dispatched_prompt_tokens=flow.prefill_tokens.in_use,
        waits_for_prefill=_is_full(flow.prefill_tokens),
        waits_for_sequences=_is_full(flow.sequences),
    )


def _is_full(capacity: _Capacity) -> bool:
    return capacity.bound is not None and capacity.in_use >= capacity.bound


def _report(worker: _Worker) -> WorkerReport:
    return WorkerReport(
        name=worker.name,
        role=worker.role,
        takes_work=worker.takes_work,
        why_not=worker.why_not,
        fingerprint=worker.fingerprint,
        family=worker.family,
        connector=worker.connector,
        model_digest=worker.model_digest,
        context_tokens=worker.context_tokens,
        device=worker.device,
        is_staged=worker.staged,
        adapters=tuple((one.name, one.digest) for one in worker.adapters),
        adapter_failures=worker.adapter_failures,
        in_flight=worker.in_flight,
        load=WorkerLoad(
            running=worker.load.running,
            waiting=worker.load.waiting,
            loading=worker.load.loading,
            blocks_total=worker.load.blocks_total,
            blocks_free=min(worker.load.blocks_free, worker.load.blocks_total),
            tickets_offered=worker.load.tickets_offered,
            tickets_claimed=worker.load.tickets_claimed,
        ),
    )
