"""Parts of an engine, and their assembly from the facts of a model, its pages and the sources of its KV."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.epochs import EpochTable
from kvferry.core.errors import KvferryError
from kvferry.core.hashing import BlockNamers
from kvferry.core.ids import AdapterId
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.execute.grammar.grammar_masks import GrammarMasks
from kvferry.engine.schedule.adapters.adapter_store import AdapterStore, LoadedAdapter
from kvferry.engine.schedule.blocks.allocation import Allocator
from kvferry.engine.schedule.loads.kv_loads import KvLoads
from kvferry.engine.schedule.plan.pipeline import Pipeline, StepRunner
from kvferry.engine.schedule.plan.scheduler import Scheduler
from kvferry.engine.schedule.speculation.speculation import Speculation
from kvferry.engine.schedule.step.adapter_slots import AdapterSlots, PackedAdapter
from kvferry.kv.interface.connector import KvLoader
from kvferry.kv.interface.tiering import KvTiers
from kvferry.kv.pages.layer_groups import FULL_ATTENTION
from kvferry.kv.pricing.price import LoadPolicy, PriceBook

LoadAdapter = Callable[[AdapterId, Path], LoadedAdapter | KvferryError | None]
"""Loads an adapter from its folder. Returns the outcome, or `None` if it begins to load the adapter and
`Engine.adapter_loaded` is called with the outcome later."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Properties of the model by which requests are checked and blocks are named."""

    max_model_tokens: int
    """Context length, prompt and output; an engine serves at most what its pages hold."""
    vocab_size: int
    """Vocabulary of the model; larger token ids are rejected."""
    eos_token_ids: tuple[int, ...]
    """The model's end-of-sequence tokens."""
    fingerprint: bytes
    """The KV layout's fingerprint; an input of every block name."""
    weight_version: str = ""
    """Version of the weights; empty if it is not known."""


@dataclass(frozen=True, slots=True)
class KvPages:
    """The pages of an engine."""

    num_blocks: int
    block_tokens: int
    """Tokens per page."""
    windows: tuple[int | None, ...] = FULL_ATTENTION
    """Sliding window of each layer group with its own pages; `None` for full attention."""
    block_bytes: int = 1
    """Bytes of one page, for cost estimates."""
    epochs: EpochTable | None = None
    """The transport's epoch table; `None` for a private table."""


@dataclass(frozen=True, slots=True)
class KvSources:
    """Where an engine loads KV from, other than its prefix cache."""

    loader: KvLoader | None = None
    """Fetches KV from peers; `None` if the engine does not fetch from peers."""
    tiers: KvTiers | None = None
    """KV tiers to load from and store to; `None` without tiers."""
    prices: PriceBook = field(default_factory=lambda: PriceBook(LoadPolicy.ALWAYS))
    """Estimates how long loading and computing take; updated by each step and load."""


@dataclass(frozen=True, slots=True)
class AdapterSupport:
    """The adapters of an engine that serves any."""

    store: AdapterStore
    """The registered adapters."""
    num_slots: int
    """Maximum number of adapters in one step."""
    activate: Callable[[int, PackedAdapter], None]
    """Puts an adapter into a slot of the runner."""
    load: LoadAdapter
    """Loads an adapter again for sequences that wait for it."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The finished parts of an engine."""

    model: ServedModel
    namers: BlockNamers
    allocator: Allocator
    scheduler: Scheduler
    pipeline: Pipeline
    prices: PriceBook
    loads: KvLoads
    masks: GrammarMasks | None
    adapters: AdapterSupport | None
    pin_share: float
    retention_share: float
    max_waiting: int
    clock: Clock


def assemble(
    runner: StepRunner,
    model: ServedModel,
    pages: KvPages,
    limits: SchedulerLimits,
    namers: BlockNamers,
    *,
    sources: KvSources | None = None,
    masks: GrammarMasks | None = None,
    speculation: Speculation | None = None,
    adapters: AdapterSupport | None = None,
    runs_ahead: bool = True,
    pin_share: float = 0.25,
    retention_share: float = 0.25,
    max_waiting: int = 1024,
    clock: Clock | None = None,
) -> EngineParts:
    """Build the parts of an engine.

    Args:
        runner: computes the steps.
        model: facts of the model.
        pages: number and shape of the pages.
        limits: limits of one step.
        namers: factory of block namers, keyed with the pool's tenant key.
        sources: where KV is loaded from. Default: prompts are computed, except their cached prefixes.
        masks: masks of constrained sequences; without it, constraints are rejected.
        speculation: drafts tokens for decoding sequences; without it, a step samples one token per sequence.
        adapters: the adapters; without it, requests with an adapter are rejected.
        runs_ahead: whether a step may be launched before the previous one's tokens are read, if the runner can.
        pin_share: maximum share of the pages that pinned prefixes hold; 0 refuses pins.
        retention_share: maximum share of the pages that clients' retentions hold; 0 refuses them.
        max_waiting: maximum number of waiting requests; further requests are rejected.
        clock: measures the steps, and the time to live of pins. Default: the system's clock.
    """
    sources = sources or KvSources()
    allocator = Allocator.create(
        pages.num_blocks,
        block_tokens=pages.block_tokens,
        windows=pages.windows,
        step_tokens=limits.step_tokens,
        epochs=pages.epochs,
    )
    slots = AdapterSlots(0) if adapters is None else AdapterSlots(adapters.num_slots, adapters.store.is_ready)
    scheduler = Scheduler(limits, allocator, speculation, slots)
    loads = KvLoads(
        scheduler,
        allocator,
        loader=sources.loader,
        tiers=sources.tiers,
        prices=sources.prices,
        block_bytes=pages.block_bytes,
    )
    return EngineParts(
        model=model,
        namers=namers,
        allocator=allocator,
        scheduler=scheduler,
        pipeline=Pipeline(runner, allocator, runs_ahead=runs_ahead),
        prices=sources.prices,
        loads=loads,
        masks=masks,
        adapters=adapters,
        pin_share=pin_share,
        retention_share=retention_share,
        max_waiting=max_waiting,
        clock=clock or SystemClock(),
    )
