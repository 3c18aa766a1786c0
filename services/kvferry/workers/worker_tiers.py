"""Opens the tiers that are configured for a worker, for the pages of its engine."""

from kvferry.core.clock import Clock
from kvferry.engine.loop.engine_loop import CommandQueue
from kvferry.kv.interface.connector import PageMemory
from kvferry.kv.interface.mirror import PageMirror
from kvferry.kv.pages.layout import KvLayout
from kvferry.kv.tiers.registry import open_tiers
from kvferry.kv.tiers.stack import TierStack
from kvferry.workers.config import WorkerConfig


def open_tier_stack(
    config: WorkerConfig,
    memory: PageMemory,
    mirror: PageMirror,
    layout: KvLayout,
    commands: CommandQueue,
    clock: Clock,
) -> TierStack | None:
    """Open the worker's tiers; return `None` if none are configured.

    Args:
        config: settings of the worker: tier URLs, size of objects and tenant key.
        memory: pages of the worker in host memory.
        mirror: mirror of the engine's pages.
        layout: layout of the pages.
        commands: queue of the engine, which gets the tiers' messages.
        clock: clock of the tiers.

    Raises:
        UsageError: a tier cannot be opened.
    """
    if not config.tiers:
        return None
    blocks, block_pages = config.tier_object_tokens // layout.block_tokens, len(layout.groups.windows)
    return TierStack(
        open_tiers(
            config.tiers,
            object_bytes=blocks * block_pages * layout.block_bytes,
            secret=config.tenant_key,
            clock=clock,
        ),
        memory.pages,
        block_bytes=layout.block_bytes,
        object_blocks=blocks,
        block_pages=block_pages,
        listener=commands.put,
        clock=clock,
        mirror=mirror,
    )
