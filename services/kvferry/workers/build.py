"""Builds the parts of a worker unit from its configuration, in the order in which they need each other."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvferry.core.clock import Clock
from kvferry.core.hashing import BlockNamers, check_name
from kvferry.core.ids import Incarnation
from kvferry.core.traces.spans import Tracer
from kvferry.engine.build import EnginePages, LoadedModel, build_engine, engine_pages
from kvferry.engine.engine import Engine
from kvferry.engine.execute.tensors.device import device_title
from kvferry.engine.loop.engine_loop import CommandQueue, EngineLoop
from kvferry.kv.fetcher import Fetcher
from kvferry.kv.interface.connector import PageMemory, Transport, TransportSetup
from kvferry.kv.interface.mirror import SAME_PAGES
from kvferry.kv.interface.ticket import Keyring
from kvferry.kv.registry import open_transport
from kvferry.kv.tiers.stack import TierStack
from kvferry.model.source import ModelSource
from kvferry.rpc.access.call_keys import CallSigner, role_key
from kvferry.rpc.access.table import CallerRole
from kvferry.rpc.inference.inference import inference_service
from kvferry.rpc.server import Service
from kvferry.rpc.tls.pool_tls import PoolTls
from kvferry.serving.constraint_check import ConstraintCheck
from kvferry.serving.model_text import open_text_model, text_model_of
from kvferry.serving.text_process import TextProcess
from kvferry.serving.text_service import TextService
from kvferry.v1 import decode_pb2_grpc, kv_events_pb2_grpc, kv_transfer_pb2_grpc, prefill_pb2_grpc
from kvferry.workers.adapters.adapter_loader import AdapterLoader
from kvferry.workers.adapters.listed_adapters import ListedAdapters
from kvferry.workers.calls.context import UnitIdentity, WorkerContext
from kvferry.workers.config import DIGEST, WorkerConfig
from kvferry.workers.handoff.kv_prefetch import KvPrefetcher
from kvferry.workers.handoff.offer_desk import OfferDesk
from kvferry.workers.handoff.page_publisher import PagePublisher
from kvferry.workers.handoff.peers import GrpcPeerControl
from kvferry.workers.handoff.prefill_progress import PrefillProgress
from kvferry.workers.local_source import LocalSource
from kvferry.workers.services.decode import DecodeService
from kvferry.workers.services.kv_events import CacheFeed, KvEventsService
from kvferry.workers.services.prefill import PrefillService
from kvferry.workers.services.transfer import TransferService
from kvferry.workers.updates.pause_keeper import PauseKeeper
from kvferry.workers.updates.weight_updates import WeightUpdates, check_version, default_version
from kvferry.workers.worker_tiers import open_tier_stack


@dataclass(frozen=True, slots=True)
class UnitEndpoint:
    """Role and addresses of a unit of a process."""

    role: str
    listen: str
    admin: str


@dataclass(frozen=True, slots=True)
class UnitParts:
    """The finished parts of a worker unit, none of which runs yet."""

    config: WorkerConfig
    endpoint: UnitEndpoint
    tls: PoolTls | None
    engine: Engine
    memory: PageMemory
    """Memory that transports access."""
    pages: EnginePages
    transport: Transport
    control: GrpcPeerControl
    fetcher: Fetcher
    tiers: TierStack | None
    loop: EngineLoop
    context: WorkerContext
    desk: OfferDesk
    cache: CacheFeed
    adapters: AdapterLoader
    listed: ListedAdapters | None
    pauses: PauseKeeper
    weights: WeightUpdates
    text_process: TextProcess
    constraints: ConstraintCheck
    services: tuple[Service, ...]
    """Services of the role, without the administration."""


def build_unit(
    config: WorkerConfig,
    endpoint: UnitEndpoint,
    model: LoadedModel,
    *,
    incarnation: Incarnation,
    clock: Clock,
    on_failure: Callable[[BaseException], None],
    tls: PoolTls | None = None,
    tracer: Tracer | None = None,
    make_pages: Callable[[LoadedModel, PageMemory], EnginePages] = engine_pages,
) -> UnitParts:
    """Build the parts of a unit; blocks while it allocates the pages.

    Args:
        config: settings of the process.
        endpoint: role and addresses of this unit.
        model: the loaded model.
        incarnation: incarnation of this unit.
        clock: clock of all parts.
        on_failure: called on the event loop after the engine has raised an unexpected error; the process should exit.
        tls: TLS of the pool; `None` for plain connections.
        tracer: traces the calls whose callers trace them; `None` if traces are off.
        make_pages: creates the engine's pages, separate from the memory that transports access.

    Raises:
        UsageError: the KV memory is too small for one request, or the transport or a tier cannot be opened.
    """
    model.check_serves()
    source = model.source
    assert source is not None, "workers serve models with files"
    check_version(config.weight_version)
    layout, version = model.layout, config.weight_version or default_version(model.files_digest)
    identity = UnitIdentity(incarnation)
    keyring = Keyring(config.ticket_secrets)
    signer = CallSigner(CallerRole.WORKER, role_key(config.ticket_secrets[0], CallerRole.WORKER))
    commands = CommandQueue()  # of the loader, the tiers and the engine, which are built in this order
    transport = open_transport(config.connector, incarnation, _transport_setup(config, endpoint))
    memory = transport.allocate(model.num_blocks, layout.block_bytes)
    pages = make_pages(model, memory)
    control = GrpcPeerControl(identity.message, signer, keyring, tls)
    fetcher = Fetcher(
        transport,
        control,
        layout,
        commands.put,
        clock=clock,
        pages=memory.pages,
        mirror=pages.mirror,
        requires_digests=config.verify_kv == DIGEST,
    )
    tiers = open_tier_stack(config, memory, pages.mirror, layout, commands, clock)
    engine = build_engine(
        model,
        pages.runner,
        namers=BlockNamers(config.tenant_key),
        epochs=memory.epochs,
        loader=fetcher,
        tiers=tiers,
        post=commands.put,
        weight_version=version,
    )
    namers = BlockNamers(config.tenant_key)  # not the engine's, which its thread uses
    block_tokens = layout.block_tokens
    cache = CacheFeed(incarnation, check_name(namers, fingerprint=layout.fingerprint, block_tokens=block_tokens))
    loop = EngineLoop(
        engine,
        commands,
        name=f"engine-{endpoint.role}",
        on_failure=on_failure,
        on_cache_changes=cache.apply,
        on_weights=lambda _: changed_weights(),
        stream_interval=config.engine.stream_interval,
    )
    context = WorkerContext(
        unit=identity,
        role=endpoint.role,
        model=model.config.name,
        layout=layout,
        connector=config.connector,
        domain=transport.domain,
        max_model_tokens=engine.max_model_tokens,
        max_sequences=config.engine.limits.max_num_seqs,
        device=device_title(model.model.device),
        is_staged=pages.mirror is not SAME_PAGES,
        loop=loop,
        clock=clock,
        tracer=tracer,
    )

    def changed_weights() -> None:
        context.layout = model.layout
        fingerprint = context.layout.fingerprint
        cache.rename(check_name(namers, fingerprint=fingerprint, block_tokens=block_tokens))

    desk = OfferDesk(context, keyring, config.offers, transport)
    publisher = PagePublisher(memory.pages, layout.block_bytes, pages.mirror, with_digests=config.verify_kv == DIGEST)
    prefetcher = KvPrefetcher(
        context,
        lambda scope: namers.of(scope, fingerprint=context.layout.fingerprint, block_tokens=block_tokens),
        signer,
        keyring,
        tls,
    )
    open_text = functools.partial(open_text_model, config.engine.model, config.engine.served_name)
    text_process, constraints = TextProcess(open_text), ConstraintCheck(open_text)
    following = PrefillProgress()
    transfer = TransferService(context, desk, keyring, transport, following, publisher)
    services = [*_kv_services(transfer, KvEventsService(cache))]
    if endpoint.role != "decode":
        services.append(_prefill_service(PrefillService(context, desk, keyring, following, publisher)))
    if endpoint.role != "prefill":
        services.append(_decode_service(DecodeService(context, keyring, control, prefetcher, publisher)))
    if endpoint.role == "both":
        services.append(inference_service(_text_service(config, source, context, text_process, constraints)))
    adapters = AdapterLoader(model, loop, config.adapter_folder)
    listed = ListedAdapters(Path(config.adapters_file), adapters, clock) if config.adapters_file else None
    pauses = PauseKeeper(context, desk)
    weights = WeightUpdates(
        model,
        pages.runner,
        context,
        config.weights_folder,
        pauses,
        adapters,
        use_layout=fetcher.use_layout,
        version=version,
        is_shared=config.role == "split",
    )
    return UnitParts(
        config, endpoint, tls, engine, memory, pages, transport, control, fetcher, tiers, loop, context, desk, cache,
        adapters, listed, pauses, weights, text_process, constraints, tuple(services),
    )  # fmt: skip


def _transport_setup(config: WorkerConfig, endpoint: UnitEndpoint) -> TransportSetup:
    """Return the configuration of a unit's transport."""
    return TransportSetup(
        listen_host=host_of(endpoint.listen),
        advertise_host=config.advertise_host.strip("[]"),
        secrets=config.ticket_secrets,
        encrypts=config.kv_encryption,
        has_ranks=config.engine.tensor_parallel > 1,
    )


def host_of(address: str) -> str:
    """Return the host of `host:port`; an IPv6 address is returned without its brackets."""
    return address.rpartition(":")[0].strip("[]")


def _kv_services(transfer: TransferService, events: KvEventsService) -> tuple[Service, Service]:
    return (
        Service("kvferry.v1.KvTransfer", lambda s: kv_transfer_pb2_grpc.add_KvTransferServicer_to_server(transfer, s)),
        Service("kvferry.v1.KvEvents", lambda s: kv_events_pb2_grpc.add_KvEventsServicer_to_server(events, s)),
    )


def _prefill_service(prefill: PrefillService) -> Service:
    return Service("kvferry.v1.Prefill", lambda s: prefill_pb2_grpc.add_PrefillServicer_to_server(prefill, s))


def _decode_service(decode: DecodeService) -> Service:
    return Service("kvferry.v1.Decode", lambda s: decode_pb2_grpc.add_DecodeServicer_to_server(decode, s))


def _text_service(
    config: WorkerConfig,
    files: ModelSource,
    context: WorkerContext,
    text_process: TextProcess,
    constraints: ConstraintCheck,
) -> TextService:
    source = LocalSource(context)
    return TextService(
        source,
        text_model_of(files, config.parsers),
        clock=context.clock,
        context_tokens=lambda: context.max_model_tokens,
        process=text_process,
        constraints=constraints,
        adapters=lambda: [info.adapter for info in context.loop.adapters if info.retired_until is None],
        vectors=source,
        tracer=lambda: context.tracer,
    )
