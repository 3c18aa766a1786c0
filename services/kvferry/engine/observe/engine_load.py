"""The load of an engine, counted after each step."""

from collections.abc import Sequence

from kvferry.core.load import WorkerLoad
from kvferry.engine.schedule.loads.kv_loads import KvLoads
from kvferry.engine.schedule.plan.scheduler import Scheduler


def engine_load(
    scheduler: Scheduler, loads: KvLoads, exports: Sequence[int], *, num_pins: int = 0, num_pinned: int = 0,
    num_held: int = 0,
) -> WorkerLoad:  # fmt: skip
    """Count all resources that an engine holds. The cost is proportional only to the number of running sequences.

    Args:
        scheduler: the engine's scheduler.
        loads: the engine's loads, prefetches and stores.
        exports: number of pages of each prompt that is pinned for offers.
        num_pins: number of pinned prefixes.
        num_pinned: number of pages that pins or retentions hold.
        num_held: number of requests that wait because generation is paused.
    """
    pool = scheduler.allocator.pool
    return WorkerLoad(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting + num_held,
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
        pins=num_pins,
        blocks_pinned=num_pinned,
    )
