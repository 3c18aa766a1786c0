"""Puts an engine together: model files, compute type, pages in a transport's memory, runner, scheduler.

Blocking and slow (seconds): call it off the event loop.
"""

import fcntl
import json
import logging
import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from kvferry.core.config import cache_dir
from kvferry.core.dtypes import DTYPES
from kvferry.core.errors import UsageError
from kvferry.core.ids import Incarnation
from kvferry.engine.cache import PagedKv, PageShape
from kvferry.engine.compute_dtype import AUTO, choose_dtype, is_measured
from kvferry.engine.device import sees_gpu
from kvferry.engine.engine import Engine, one_secret
from kvferry.engine.models.build import build_model
from kvferry.engine.models.model import Model
from kvferry.engine.runner import Runner
from kvferry.kv.connector import PageMemory, Transport, TransportSetup
from kvferry.kv.layout import KvLayout
from kvferry.kv.price import PriceBook
from kvferry.kv.registry import open_transport
from kvferry.model.config import ModelConfig
from kvferry.model.source import ModelSource, open_model
from kvferry.workers.config import EngineConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, ready for any number of engines in this process."""

    source: ModelSource
    model: Model
    dtype: str
    """Of the KV."""
    weights: str = "shipped"
    """Their form."""
    numerics: str = "exact"
    """How inputs of products are kept."""

    @property
    def digest(self) -> str:
        """Of what the weights are as computed with: converted ones, or rounded inputs, give other KV."""
        changes = [name for name, default in ((self.weights, "shipped"), (self.numerics, "exact")) if name != default]
        return "-".join((self.source.digest, *changes))


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and what its surroundings need to know."""

    engine: Engine
    memory: PageMemory
    transport: Transport
    layout: KvLayout


def load_model(config: EngineConfig) -> LoadedModel:
    """Open and load the model.

    Raises:
        KvferryError: it is unknown, damaged, or the settings do not fit it.
    """
    if config.device == AUTO and sees_gpu():
        _log.warning("there is a GPU, and it is not used: workers keep their pages in the host's memory so far")
    source = open_model(config.model, served_name=config.served_name)
    dtype = _dtype(config, source.config)
    model = build_model(
        source.config,
        source.tensors,
        dtype=dtype,
        weights=config.weights,
        numerics=config.numerics,
        kernels=config.kernels,
        threads=config.threads,
    )
    return LoadedModel(source, model, dtype, config.weights, config.numerics)


def build_engine(
    config: EngineConfig,
    model: LoadedModel,
    *,
    connector: str,
    setup: TransportSetup,
    incarnation: Incarnation,
    tenant_secret: bytes,
) -> BuiltEngine:
    """One engine over a loaded model, its pages in the connector's memory.

    Raises:
        UsageError: not even one request fits the memory given.
    """
    shape_of = model.source.config
    layout = KvLayout(
        model_digest=model.digest,
        dtype=model.dtype,
        num_layers=shape_of.num_layers,
        num_kv_heads=shape_of.num_kv_heads,
        head_dim=shape_of.head_dim,
        block_tokens=config.block_tokens,
    )
    num_blocks = config.kv_bytes // layout.block_bytes
    if num_blocks < 2:
        raise UsageError(
            f"kv_memory of {config.kv_bytes} bytes is too small: a page takes {layout.block_bytes} bytes, and two are "
            "the least",
            field="kv_memory",
        )
    transport = open_transport(connector, incarnation, setup)
    memory = transport.allocate(num_blocks, layout.block_bytes)
    shape = PageShape.of(shape_of, block_tokens=config.block_tokens, dtype=model.model.dtype)
    most = shape_of.max_model_tokens
    engine = Engine(
        Runner(model.model, PagedKv.over(shape, memory.pages)),
        num_blocks=num_blocks,
        block_tokens=config.block_tokens,
        max_model_tokens=min(config.max_model_tokens or most, most),
        vocab_size=shape_of.vocab_size,
        eos_token_ids=shape_of.eos_token_ids,
        fingerprint=layout.fingerprint,
        limits=config.limits,
        tenant_secret=one_secret(tenant_secret),
        epochs=memory.epochs,
        block_bytes=layout.block_bytes,
        prices=PriceBook(config.load_policy),
    )
    return BuiltEngine(engine, memory, transport, layout)


def _dtype(settings: EngineConfig, config: ModelConfig) -> str:
    """The compute type. A measured choice is written down, so that all workers of a machine agree on it; where the
    cache folder can only be read, a choice found there counts, else this worker measures for itself."""
    if not is_measured(settings.dtype, config, kernels=settings.kernels):
        return choose_dtype(settings.dtype, config, kernels=settings.kernels)
    key = f"{platform.machine()} {_cpu_name()} torch {version('torch')} {config.name}"
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "dtype.lock").open("w")
    except OSError as error:
        _log.info("the choice of a compute type is not kept: %s", error)
        return choose_dtype(_read_record(folder / "dtype.json").get(key, AUTO), config, kernels=settings.kernels)
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return choose_dtype(_recorded(key, folder / "dtype.json", settings, config), config, kernels=settings.kernels)


def _recorded(key: str, record: Path, settings: EngineConfig, config: ModelConfig) -> str:
    """The choice that is written down, after measuring it where there was none."""
    known = _read_record(record)
    if key not in known:
        known[key] = choose_dtype(AUTO, config, kernels=settings.kernels)
        fresh = record.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(known, indent=1))
        fresh.replace(record)
    return known[key]


def _read_record(path: Path) -> dict[str, str]:
    try:
        read = json.loads(path.read_text())
    except (OSError, ValueError):  # missing or damaged: measured anew
        return {}
    return {k: v for k, v in read.items() if v in DTYPES} if isinstance(read, dict) else {}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "cpu family", "model\t")
    return " ".join(line.partition(":")[2].strip() for line in lines[:30] if line.startswith(wanted))
