"""Components of a worker unit: what `start` creates and `stop` closes."""

import asyncio
from dataclasses import dataclass, field

from kvferry.engine.build import EnginePages
from kvferry.engine.engine import Engine
from kvferry.engine.loop.engine_loop import CommandQueue
from kvferry.kv.fetcher import Fetcher
from kvferry.kv.interface.connector import PageMemory, Transport
from kvferry.kv.tiers.stack import TierStack
from kvferry.rpc.server import RpcServer
from kvferry.workers.handoff.peers import GrpcPeerControl
from kvferry.workers.services.admin import AdminService


@dataclass(frozen=True, slots=True)
class UnitParts:
    """An engine and the components it uses."""

    engine: Engine
    commands: CommandQueue
    memory: PageMemory
    """Memory that transports access."""
    pages: EnginePages
    transport: Transport
    control: GrpcPeerControl
    fetcher: Fetcher
    tiers: TierStack | None


@dataclass(slots=True)
class RunningServers:
    """The servers of a unit and its tasks."""

    work: RpcServer
    admin: RpcServer
    admin_service: AdminService
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
