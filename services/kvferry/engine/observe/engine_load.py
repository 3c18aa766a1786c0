"""The load of an engine, counted after each step."""

from collections.abc import Sequence

from kvferry.core.load import WorkerLoad
from kvferry.engine.schedule.loads.kv_loads import KvLoads
from kvferry.engine.schedule.pins.pins import Pins
from kvferry.engine.schedule.plan.scheduler import Scheduler


def engine_load(scheduler: Scheduler, loads: KvLoads, exports: Sequence[int], pins: Pins | None = None) -> WorkerLoad:
    """Count all resources that an engine holds. The cost is proportional only to the number of running sequences.

    Args:
        scheduler: the engine's scheduler.
        loads: the engine's loads, prefetches and stores.
        exports: number of pages of each prompt that is pinned for offers.
        pins: the pinned prefixes; `None` for an engine that pins none.
    """
    pool = scheduler.allocator.pool
    return WorkerLoad(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        loading=scheduler.num_loading,
        blocks_total=pool.num_blocks,
        blocks_free=pool.num_free,
        blocks_quarantined=pool.num_quarantined,
        exports=len(exports),
        exported_blocks=sum(exports),
        transfers=loads.num_transfers,
        stores=len(loads.stores_held),
        tokens_to_compute=scheduler.num_tokens_to_compute,
        blocks_cached=len(scheduler.allocator.index),
        pins=0 if pins is None else len(pins),
        blocks_pinned=0 if pins is None else pins.num_pages,
    )
