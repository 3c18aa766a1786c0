"""A model that several ranks compute, seen from the first one: a `Model` like any other."""

import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvferry.core.errors import InvariantBroken
from kvferry.core.process.memory_file import MemoryFile, MemoryPlace
from kvferry.engine.execute.models.compiled import CompiledTransformer
from kvferry.engine.execute.models.compiled_adapter import CompiledAdapter
from kvferry.engine.execute.models.model import Logits
from kvferry.engine.execute.ranks.messages import ModelPlan, RankPages, packed_batch
from kvferry.engine.execute.ranks.rank_group import RankGroup
from kvferry.engine.execute.ranks.share_model import SharedPages, logits_over, share_of_adapter
from kvferry.engine.execute.tensors.batch import StepBatch
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.weights.adapters.adapter_folder import Adapter
from kvferry.weights.config import ModelConfig
from kvferry.weights.shares import Share


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class RankedAdapter:
    """An adapter of which each rank has a share."""

    number: int
    """Number of the adapter in messages."""
    own: CompiledAdapter
    """The first rank's share."""
    num_bytes: int
    """Bytes of all shares."""


class RankedModel:
    """A model whose ranks compute every step together. Thread-safe (calls are serialized), so engines of one process
    can share it."""

    def __init__(self, own: CompiledTransformer, group: RankGroup, plan: ModelPlan) -> None:
        """
        Args:
            own: the first rank's share.
            group: the other ranks, which have loaded their shares.
            plan: how the ranks compute.
        """
        self._own, self._group, self._plan = own, group, plan
        self.config: ModelConfig = own.config
        self.dtype, self.device = own.dtype, own.device
        self.kernels = own.kernels
        self.rounds_inputs = plan.rounds_inputs
        self.weight_bytes = own.weight_bytes * plan.size
        self._computing = threading.Lock()
        self._engines: dict[int, tuple[int, SharedPages]] = {}
        self._indices = itertools.count()

    @property
    def has_layer_groups(self) -> bool:
        """See `model.Model.has_layer_groups`."""
        return self._own.has_layer_groups

    @property
    def why_no_adapters(self) -> str | None:
        """See `model.Model.why_no_adapters`."""
        return self._own.why_no_adapters

    def pack_adapter(self, adapter: Adapter) -> RankedAdapter:
        """See `model.Model.pack_adapter`."""
        own = self._own.pack_adapter(share_of_adapter(adapter, self.config, Share(0, self._plan.size)))
        packed = RankedAdapter(self._group.add_adapter(adapter), own, own.num_bytes * self._plan.size)
        weakref.finalize(packed, self._group.forget_adapter, packed.number).atexit = False
        return packed

    def share_pages(self, kv: PagedKv, place: MemoryPlace) -> None:
        """Have all ranks map an engine's pages, before its first step.

        Args:
            kv: the pages.
            place: memory file that begins with the pages.

        Raises:
            InvariantBroken: a rank has ended, or takes too long.
        """
        index = next(self._indices)
        file = MemoryFile("kvferry-logits", self._plan.logit_rows * self.config.vocab_size * 4)
        self._group.add_pages(RankPages(index, kv.layout, kv.num_blocks, place, file.place))
        self._engines[kv.address] = index, SharedPages(kv, logits_over(file.memory, self.config.vocab_size))

    def compute(self, batch: StepBatch, kv: PagedKv) -> Logits:
        """See `model.Model.compute`.

        Raises:
            InvariantBroken: a rank has ended, or did not compute its part in time; no further step can be computed.
        """
        index, pages = self._engines[kv.address]
        ranked = [adapter for adapter in batch.adapters if isinstance(adapter, RankedAdapter)]
        values = packed_batch(batch)
        if ranked:
            batch = replace(batch, adapters=tuple(adapter.own for adapter in ranked))
        with self._computing:
            self._group.send_step(index, values, tuple(adapter.number for adapter in ranked))
            try:
                return self._own.compute_into(batch, pages.kv, pages.room_for(len(batch.sample_rows)))
            except RuntimeError as error:
                raise self._group.failed(str(error)) from error

    def notify(self, failed: Callable[[InvariantBroken], None]) -> None:
        """Have a function called, on another thread, when a rank has ended unexpectedly.

        Args:
            failed: called with the error of all further steps.
        """
        self._group.notify(failed)

    def phase_seconds(self) -> dict[str, float]:
        """See `CompiledTransformer.phase_seconds`; of the first rank."""
        return self._own.phase_seconds()

    def close(self) -> None:
        """Stop the other ranks; idempotent. No step can be computed afterwards."""
        self._group.close()
