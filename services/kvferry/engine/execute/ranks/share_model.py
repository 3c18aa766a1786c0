"""Loads one rank's share of a model, and its view of pages and logits."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.core.dtypes import activation_dtype
from kvferry.core.process.memory_file import open_memory
from kvferry.engine.execute.models.compiled import CompiledTransformer, LogitRoom, RankPlace
from kvferry.engine.execute.ranks.messages import ModelPlan, Packed, RankAdapter, RankPages, packed, unpacked
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.kernels import compiled
from kvferry.model.shapes import shape_of
from kvferry.model.source import open_model
from kvferry.weights.adapters.adapter_folder import Adapter, LowRank
from kvferry.weights.config import ModelConfig
from kvferry.weights.shares import Share, cut_of
from kvferry.weights.tensors import TensorSource, layer_prefix


def load_share(
    plan: ModelPlan, config: ModelConfig, tensors: TensorSource, share: Share, sums: memoryview
) -> CompiledTransformer:
    """Load one rank's share of a model.

    Args:
        plan: how ranks compute the model.
        config: configuration of the whole model, as served.
        tensors: tensors of the whole model.
        share: the rank's share.
        sums: memory for sums over ranks.

    Raises:
        ModelFileError: the weights do not match the configuration, or are not finite.
        UsageError: quantized weights cannot be divided among the ranks.
    """
    memory = np.frombuffer(sums, np.uint8)
    ranks = compiled.make_ranks(memory, share.rank, share.size, config.hidden_size, plan.step_rows, plan.seconds)
    return CompiledTransformer(
        config,
        tensors,
        dtype=plan.dtype,
        form=plan.form,
        level=plan.level,
        threads=plan.threads,
        rounds_inputs=plan.rounds_inputs,
        place=RankPlace(share, ranks),
    )


def open_share(plan: ModelPlan) -> tuple[ModelConfig, TensorSource]:
    """Open a model in the process of another rank; return its configuration as served, and its tensors.

    Raises:
        ModelFileError: the files are missing or damaged.
    """
    if plan.load_format != "dummy":
        source = open_model(plan.model)
        return source.config.served(plan.max_model_len), source.tensors
    import torch  # importing torch takes a second

    from kvferry.engine.execute.models.random_tensors import RandomTensors

    config = shape_of(plan.model).served(plan.max_model_len)
    drawn = getattr(torch, activation_dtype(plan.dtype))
    return config, RandomTensors(config, dtype=drawn, device="cpu", seed=plan.seed)


@dataclass(frozen=True, slots=True, eq=False)
class SharedPages:
    """The pages of an engine, and memory for the logits of its steps, in memory that all ranks map."""

    kv: PagedKv
    logits: npt.NDArray[np.float32]
    """[logit_rows, vocabulary]"""

    def room_for(self, rows: int) -> LogitRoom:
        """Return memory for the logits of `rows` rows."""
        return LogitRoom.of(self.logits, rows)


def logits_over(memory: memoryview, vocab_size: int) -> npt.NDArray[np.float32]:
    """Return shared memory as the logits of a step, [logit_rows, vocabulary]."""
    return np.frombuffer(memory, np.float32).reshape(-1, vocab_size)


def open_pages(pages: RankPages, vocab_size: int) -> SharedPages:
    """Map the pages of an engine in the process of another rank.

    Raises:
        OSError: the first rank's process has ended.
    """
    memory = open_memory(pages.pages)[: pages.num_blocks * pages.layout.block_bytes]
    return SharedPages(PagedKv.over(pages.layout, memory), logits_over(open_memory(pages.logits), vocab_size))


def share_of_adapter(adapter: Adapter, config: ModelConfig, share: Share) -> Adapter:
    """Return one rank's share of an adapter: rows of B where it computes some outputs, columns of A where it has some
    inputs. The sums over ranks are then sums of the adapter's updates too.

    Args:
        adapter: an adapter of the whole model.
        config: configuration of the whole model.
        share: the rank's share.
    """
    updates = {}
    for (layer, module), update in adapter.updates.items():
        cut = cut_of(f"{layer_prefix(layer)}{module}.weight", config, share)
        rows = slice(None) if cut.rows is None else slice(cut.rows.start, cut.rows.stop)
        columns = slice(None) if cut.columns is None else slice(cut.columns.start, cut.columns.stop)
        updates[layer, module] = LowRank(
            np.ascontiguousarray(update.a[:, columns]), np.ascontiguousarray(update.b[rows])
        )
    return Adapter(updates, adapter.digest)


def sent_adapter(adapter: Adapter, number: int, forgotten: tuple[int, ...]) -> RankAdapter:
    """Return the message with a rank's share of an adapter.

    Args:
        adapter: the share.
        number: number of the adapter.
        forgotten: numbers of adapters that no later step uses.
    """
    updates = ((layer, module, packed(u.a), packed(u.b)) for (layer, module), u in adapter.updates.items())
    return RankAdapter(number, tuple(updates), forgotten)


def received_adapter(message: RankAdapter) -> Adapter:
    """Return the share of an adapter in a message, without a digest."""

    def floats(value: Packed) -> npt.NDArray[np.float32]:
        return unpacked(value, np.float32).astype(np.float32, copy=False)

    updates = {(layer, module): LowRank(floats(a), floats(b)) for layer, module, a, b in message.updates}
    return Adapter(updates, b"")


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Restrict this thread, and the threads that it starts, to some CPU cores, so that the memory that they write first
    is near to these cores; no effect without cores."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
