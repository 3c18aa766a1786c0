"""Composition root of the engine: loads the model from settings and builds its runner and engine.

`LLM`, workers and benchmarks build their engines here. Calls block for seconds; do not call them on an event loop.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kvferry.core.clock import Clock
from kvferry.core.dtypes import activation_dtype
from kvferry.core.epochs import EpochTable
from kvferry.core.errors import UsageError
from kvferry.core.hashing import BlockNamers
from kvferry.core.process.memory_file import MemoryFile
from kvferry.core.settings.engine import ON, EngineSettings
from kvferry.engine.adapter_settings import check_adapter_settings
from kvferry.engine.engine import Engine
from kvferry.engine.execute.adapter_loads import AdapterLoads, outcome_of
from kvferry.engine.execute.build_runner import build_runner
from kvferry.engine.execute.drafts.load_draft import LoadedDraft, load_draft
from kvferry.engine.execute.drafts.load_heads import LoadedEagle, LoadedMedusa, load_heads
from kvferry.engine.execute.dtypes.compute_dtype import choose_dtype
from kvferry.engine.execute.dtypes.dtype_record import recorded_dtype
from kvferry.engine.execute.grammar.grammar_masks import OFFLINE_SECONDS, GrammarMasks
from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.models.model import Model
from kvferry.engine.execute.ranks.build_ranked import build_ranked_model
from kvferry.engine.execute.ranks.ranked_model import RankedModel
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.tensors.device import CPU, choose_device
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.kv_memory import kv_memory, releases_window_pages
from kvferry.engine.parts import AdapterSupport, KvPages, KvSources, LoadAdapter, ServedModel, assemble
from kvferry.engine.schedule.adapters.adapter_store import AdapterStore, LoadedAdapter
from kvferry.engine.schedule.messages import AdapterLoaded, MaskReady, ModelFailed
from kvferry.engine.schedule.speculation.settings import EAGLE, MEDUSA, parse_speculation
from kvferry.engine.schedule.speculation.speculation import Speculation, speculation_of
from kvferry.kernels.backends import device_kind
from kvferry.kv.interface.connector import KvLoader, PageMemory
from kvferry.kv.interface.mirror import SAME_PAGES, PageMirror
from kvferry.kv.interface.tiering import KvTiers
from kvferry.kv.pages.layout import KvLayout
from kvferry.kv.pricing.price import LoadPolicy, PriceBook
from kvferry.model.shapes import shape_of
from kvferry.model.source import ModelSource, open_model
from kvferry.text.grammar.compiler import GrammarCompiler
from kvferry.weights.adapters.adapter_folder import read_adapter
from kvferry.weights.config import ModelConfig
from kvferry.weights.features import model_digest
from kvferry.weights.tensors import TensorSource

_log = logging.getLogger(__name__)
_MIN_BLOCKS = 2
_MIB = 1 << 20
_MIN_CONTEXT_TOKENS = 8
"""Minimum context length of a server: the prompt of its first request and a token of output."""
MIN_KV_TOKENS = 1024
"""Minimum number of tokens for which a worker must have KV memory, unless the context is shorter."""


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A loaded model, which several engines of this process can share, unless its weights change."""

    settings: EngineSettings
    config: ModelConfig
    source: ModelSource | None
    """The model's files; `None` if the weights are random."""
    model: Model
    dtype: str
    """Data type of the KV."""
    kv_bytes: int
    """KV memory of an engine in bytes."""
    draft: LoadedDraft | LoadedEagle | LoadedMedusa | None = None
    """The draft model or the heads; `None` if there are none."""
    releases_windows: bool = False
    """Whether pages behind sliding windows are released."""
    new_digest: str = ""
    """Digest of the files of the weights, if they were changed since the start."""

    @property
    def files_digest(self) -> str:
        """Digest of the files of the weights; empty if they are random."""
        return self.new_digest or ("" if self.source is None else self.source.digest)

    def take_weights(self, model: Model, digest: str) -> None:
        """Use other weights of the same model.

        Args:
            model: the model with the weights.
            digest: digest of their files.
        """
        self.model, self.new_digest = model, digest

    @property
    def layout(self) -> KvLayout:
        """Layout of the model's KV pages. Its model digest covers weight format, numerics and the features of the
        model's family, since all of them change the KV."""
        return self.layout_with(self.files_digest)

    def layout_with(self, files_digest: str) -> KvLayout:
        """Return the layout of the pages with weights of other files.

        Args:
            files_digest: digest of the files.
        """
        defaults = EngineSettings("")
        settings = self.settings
        changes = [
            value
            for value, default in ((settings.weights, defaults.weights), (settings.numerics, defaults.numerics))
            if value != default
        ]
        digest = ""
        if self.source is not None:
            digest = model_digest(files_digest, self.source.config, self.config.max_model_tokens, changes)
        return replace(self.page_layout, model_digest=digest)

    @property
    def page_layout(self) -> KvLayout:
        """Layout of the pages, without the model's digest."""
        return KvLayout.of(
            self.config,
            block_tokens=self.settings.block_tokens,
            dtype=self.dtype,
            releases_windows=self.releases_windows,
        )

    @property
    def num_blocks(self) -> int:
        """Number of pages that fit into the KV memory.

        Raises:
            UsageError: fewer than two pages fit.
        """
        block_bytes = self.layout.block_bytes
        count = self.kv_bytes // block_bytes
        if count < _MIN_BLOCKS:
            raise UsageError(
                f"kv_memory of {self.kv_bytes} bytes is too small: at least {_MIN_BLOCKS} pages of {block_bytes} bytes "
                "are needed",
                field="kv_memory",
            )
        return count

    def check_serves(self) -> None:
        """Check that the KV memory suffices for a server, whose requests have unknown lengths; a program that calls the
        engine directly may need less.

        Raises:
            UsageError: the context is too short for any request, or the memory holds fewer tokens than both
                `MIN_KV_TOKENS` and the context length.
        """
        if self.context_tokens < _MIN_CONTEXT_TOKENS:
            raise UsageError(
                f"max_model_len must be at least {_MIN_CONTEXT_TOKENS} for a server, or 0 for the model's context "
                f"length, not {self.settings.max_model_len}",
                field="max_model_len",
            )
        block_bytes, block_tokens = self.layout.block_bytes, self.settings.block_tokens
        min_tokens = min(MIN_KV_TOKENS, self.context_tokens)
        groups, step_tokens = self.layout.groups, self.settings.limits.step_tokens
        pages = groups.max_pages(min_tokens, block_tokens=block_tokens, step_tokens=step_tokens)
        needed = max(_MIN_BLOCKS, pages)
        count = self.kv_bytes // block_bytes
        if count < needed:
            tokens = count * block_tokens // len(groups.windows)
            raise UsageError(
                f"kv_memory of {self.kv_bytes} bytes holds the KV of only {tokens} tokens, and a server needs "
                f"{min_tokens:,}; set kv_memory to at least {-(-needed * block_bytes // _MIB)}MiB, or reduce "
                "max_model_len",
                field="kv_memory",
            )

    def close(self) -> None:
        """Stop the other processes that compute the model, if there are any; idempotent. The model is then unusable."""
        if isinstance(self.model, RankedModel):
            self.model.close()

    @property
    def context_tokens(self) -> int:
        """Context length in tokens as set, at most the model's; the KV memory may hold less."""
        return min(self.settings.max_model_len or self.config.max_model_tokens, self.config.max_model_tokens)


def load_model(settings: EngineSettings, *, device: str | None = None, releases_windows: bool = False) -> LoadedModel:
    """Open and load a model.

    Args:
        settings: the engine's settings.
        device: overrides `settings.device`.
        releases_windows: whether pages behind sliding windows are released on CPUs if the setting is `auto`.

    Raises:
        KvferryError: the model is unknown or damaged, or a setting is unknown or not valid for it (`UsageError`).
    """
    speculation = parse_speculation(settings.speculation)
    where = choose_device(device or settings.device, kernels=settings.kernels)
    if speculation.is_rejecting and where != CPU:
        raise UsageError(
            f"speculation with accept=rejection needs the CPU sampler and is not supported on {where}; use "
            "accept=exact",
            field="speculation",
        )
    if settings.tensor_parallel > 1 and speculation.method in (EAGLE, MEDUSA):
        raise UsageError(
            f"speculation with {speculation.method} heads needs the whole model in one process; set tensor_parallel to "
            "1, or use another kind of drafts",
            field="speculation",
        )
    source = None if settings.load_format == "dummy" else open_model(settings.model, served_name=settings.served_name)
    config = shape_of(settings.model) if source is None else source.config
    config = config.served(settings.max_model_len)
    check_adapter_settings(settings, config.name)
    dtype = _dtype(settings, config, where)
    tensors = _random_tensors(config, dtype, where, settings.seed) if source is None else source.tensors
    try:
        model = with_weights(settings, config, tensors, dtype, where)
    except (
        RuntimeError
    ) as error:  # torch's error for exhausted memory, whose class cannot be named without importing torch
        if where == CPU or type(error).__name__ != "OutOfMemoryError":
            raise
        raise UsageError(f"the weights of {config.name} do not fit into GPU memory: {error}", field="model") from error
    if settings.adapters and model.why_no_adapters is not None:
        raise UsageError(f"adapters cannot be served: {model.why_no_adapters}", field="adapters")
    draft = load_draft(
        speculation, config, source, dtype=dtype, device=where, kernels=settings.kernels, threads=settings.threads
    ) or load_heads(speculation, model)
    kv_bytes = kv_memory(settings, config, where)
    if draft is not None and not settings.kv_memory and where != CPU:
        kv_bytes = int(kv_bytes / (1.0 + draft.kv_share(config)))
    loaded = LoadedModel(settings, config, source, model, dtype, kv_bytes, draft)
    released = releases_window_pages(settings, model, loaded.context_tokens, is_default=releases_windows)
    return replace(loaded, releases_windows=released)


def with_weights(
    settings: EngineSettings, config: ModelConfig, tensors: TensorSource, dtype: str, device: str
) -> Model:
    """Build a model as an engine with these settings computes it.

    Args:
        settings: the engine's settings.
        config: the model's shape.
        tensors: the weights.
        dtype: data type of the KV.
        device: device of the model, as a torch device string.

    Raises:
        KvferryError: the weights do not match the configuration, or the kernels do not support them.
    """
    if settings.tensor_parallel > 1:
        return build_ranked_model(config, tensors, settings, dtype=dtype, device=device)
    return build_model(
        config,
        tensors,
        dtype=dtype,
        weights=settings.weights,
        numerics=settings.numerics,
        device=device,
        kernels=settings.kernels,
        threads=settings.threads,
    )


@dataclass(frozen=True, slots=True)
class EnginePages:
    """The pages of an engine with transports."""

    runner: Runner
    """Computes with the pages."""
    mirror: PageMirror
    """Mapping between the pages and the memory that transports access."""


def engine_pages(loaded: LoadedModel, memory: PageMemory) -> EnginePages:
    """Build a model's runner over memory that a transport has allocated, or over pages on the model's device that are
    mirrored in that memory.

    Args:
        loaded: model, weights and settings.
        memory: pages and epochs in host memory that the transport reads and writes.

    Raises:
        UsageError: the KV memory is too small, or host memory for the mirror cannot be pinned.
    """
    if device_kind(loaded.model.device) == CPU:
        return EnginePages(runner_for(loaded, memory), SAME_PAGES)
    from kvferry.engine.execute.gpu.host_mirror import HostMirror  # imports torch
    from kvferry.kernels.host_copies import CudaCopyStream, HostCopies, pin

    runner = runner_for(loaded)
    pages = runner.kv.rows
    pin(memory.pages)
    copies = HostCopies(pages, memory.pages, CudaCopyStream(pages.device))
    return EnginePages(runner, HostMirror(copies, memory.epochs))


def runner_for(loaded: LoadedModel, memory: PageMemory | None = None) -> Runner:
    """Build a model's runner with its KV pages.

    Args:
        loaded: the model.
        memory: host memory for the pages that a transport has allocated; default: memory allocated on the model's
            device.

    Raises:
        UsageError: the KV memory is too small.
    """
    settings = loaded.settings
    layout = loaded.page_layout  # without digest: a runner checks only the shape of its pages
    pages = _pages(loaded, layout, memory)
    return build_runner(
        loaded.model,
        pages,
        max_sequences=settings.limits.max_num_seqs,
        cuda_graphs=settings.cuda_graphs,
        runs_ahead=settings.async_steps == ON,
    )


def _pages(loaded: LoadedModel, layout: KvLayout, memory: PageMemory | None) -> PagedKv:
    model = loaded.model
    if not isinstance(model, RankedModel):
        if memory is None:
            return PagedKv.allocate(layout, loaded.num_blocks, model.device)
        return PagedKv.over(layout, memory.pages)
    if memory is None:
        file = MemoryFile("kvferry-pages", loaded.num_blocks * layout.block_bytes)
        pages, place = PagedKv.over(layout, file.memory), file.place
    else:
        assert memory.place is not None, "transports of models with ranks share their memory"
        pages, place = PagedKv.over(layout, memory.pages), memory.place
    model.share_pages(pages, place)
    return pages


def build_engine(
    loaded: LoadedModel,
    runner: Runner,
    *,
    namers: BlockNamers,
    epochs: EpochTable | None = None,
    loader: KvLoader | None = None,
    tiers: KvTiers | None = None,
    post: Callable[[MaskReady | ModelFailed | AdapterLoaded], None] | None = None,
    clock: Clock | None = None,
    weight_version: str = "",
) -> Engine:
    """Build an engine for a loaded model.

    Args:
        loaded: the model.
        runner: the model's runner (`runner_for`).
        namers: factory of block names.
        epochs: the transport's epoch table; default: a private table.
        loader: fetches KV from peers; `None` if this engine does not fetch from peers.
        tiers: KV tiers to load from and store to; `None` without tiers.
        post: puts a command into the queue of the engine's owner, from another thread: the mask of a postponed sequence
            is ready, an adapter is loaded, or a rank of the model has ended. `None` if steps wait for masks and
            adapters, because the engine has no other callers.
        clock: measures the steps; default: the system's clock.
        weight_version: version of the weights; empty if it is not known.

    Raises:
        ModelFileError: an adapter of the settings is missing or damaged, or does not fit the model.
    """
    settings, config, layout = loaded.settings, loaded.config, loaded.layout
    if post is not None and isinstance(loaded.model, RankedModel):
        loaded.model.notify(lambda error: post(ModelFailed(error)))
    parts = assemble(
        runner,
        ServedModel(loaded.context_tokens, config.vocab_size, config.eos_token_ids, layout.fingerprint, weight_version),
        KvPages(runner.kv.num_blocks, settings.block_tokens, layout.groups.windows, layout.block_bytes, epochs),
        settings.limits,
        namers,
        sources=KvSources(loader, tiers, PriceBook(LoadPolicy(settings.load_policy))),
        masks=_masks(loaded, post),
        speculation=_speculation(loaded, runner),
        adapters=_adapters(loaded, runner, post),
        runs_ahead=settings.async_steps == ON,
        pin_share=settings.pin_share,
        retention_share=settings.retention_share,
        clock=clock,
    )
    return Engine(parts)


def load_adapter(loaded: LoadedModel, path: Path) -> LoadedAdapter:
    """Read an adapter of a model from its folder. Takes a fraction of a second; thread-safe.

    Args:
        loaded: the model.
        path: the adapter's folder.

    Raises:
        UsageError: the model's kernels do not support adapters.
        ModelFileError: the folder is missing or damaged, or the adapter does not fit the model.
    """
    reason = loaded.model.why_no_adapters
    if reason is not None:
        raise UsageError(f"adapters cannot be served: {reason}", field="adapters")
    adapter = read_adapter(path, loaded.config, max_rank=loaded.settings.max_adapter_rank)
    return LoadedAdapter(path, adapter.digest, adapter.rank, loaded.model.pack_adapter(adapter))


def _adapters(
    loaded: LoadedModel, runner: Runner, post: Callable[[AdapterLoaded], None] | None
) -> AdapterSupport | None:
    """Return the adapters of the settings; `None` if the model does not support adapters.

    Raises:
        ModelFileError: a folder is missing or damaged, or its adapter does not fit the model.
    """
    settings = loaded.settings
    if not settings.adapter_slots or loaded.model.why_no_adapters is not None:
        return None
    store = AdapterStore(max_bytes=settings.adapter_memory)
    for name, path in settings.adapters:
        store.add(name, load_adapter(loaded, Path(path)))
        store.trim((), lambda _: False)
    return AdapterSupport(store, settings.adapter_slots, runner.activate, _adapter_loads(loaded, post))


def _adapter_loads(loaded: LoadedModel, post: Callable[[AdapterLoaded], None] | None) -> LoadAdapter:
    """Return the function that loads adapters again: on a thread, or at once if the engine has no other callers."""
    load = partial(load_adapter, loaded)
    return AdapterLoads(load, post).begin if post is not None else lambda _, folder: outcome_of(load, folder)


def _speculation(loaded: LoadedModel, runner: Runner) -> Speculation | None:
    settings = loaded.settings
    parsed = parse_speculation(settings.speculation)
    if loaded.draft is None:
        return speculation_of(parsed)
    if loaded.draft.shown is not None:
        runner.shown = loaded.draft.shown
    tokens = min(runner.kv.num_blocks * settings.block_tokens, settings.limits.max_num_seqs * loaded.context_tokens)
    return speculation_of(parsed, loaded.draft.build(settings.block_tokens, tokens, loaded.config.vocab_size))


def _masks(loaded: LoadedModel, post: Callable[[MaskReady], None] | None) -> GrammarMasks | None:
    if loaded.source is None:
        return None
    compiler = GrammarCompiler(loaded.source.tokenizer)
    if post is None:
        return GrammarMasks(compiler, late_seconds=OFFLINE_SECONDS, late_share=1.0)
    return GrammarMasks(compiler, notify=lambda: post(MaskReady()))


def _dtype(settings: EngineSettings, config: ModelConfig, device: str) -> str:
    """Choose the data type of the KV. A choice by measurement is recorded, so that all processes of a machine agree."""
    if device != CPU or settings.load_format == "dummy":
        return choose_dtype(settings.dtype, config, kernels=settings.kernels, device=device)
    return recorded_dtype(settings.dtype, config, kernels=settings.kernels)


def _random_tensors(config: ModelConfig, dtype: str, device: str, seed: int) -> TensorSource:
    import torch  # importing torch takes a second

    from kvferry.engine.execute.models.random_tensors import RandomTensors

    drawn = activation_dtype(dtype)
    return RandomTensors(config, dtype=getattr(torch, drawn), device=device, seed=seed)
