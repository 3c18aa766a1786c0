"""Attention plans of layer groups whose pages behind windows are released, for kernels that work on tensors.

The kernels get sequences that begin with the first block that a window still reaches: positions count from there, and
keys were rotated when they were written.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvferry.engine.execute.tensors.batch import StepBatch
from kvferry.engine.execute.tensors.device_batch import to_device, trees_of
from kvferry.kernels.batch import AttentionBatch
from kvferry.kernels.ops import AttentionPlan
from kvferry.kv.pages.layout import KvLayout

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlans:
    """Plans and KV slots of a step, by group."""

    places: tuple[tuple[int, int], ...]
    """(group, place in the page) of each layer."""
    plans: tuple[AttentionPlan, ...]
    slots: tuple[torch.Tensor, ...]
    """[T] int64 of each group: KV slot of each row."""

    def slots_of(self, layer: int) -> tuple[int, torch.Tensor]:
        """Return the place of a layer in its pages, and the KV slots of the rows, [T] int64."""
        group, place = self.places[layer]
        return place, self.slots[group]

    def plan_of(self, layer: int) -> tuple[int, AttentionPlan]:
        """Return the place of a layer in its pages, and the attention plan."""
        group, place = self.places[layer]
        return place, self.plans[group]


def group_plans(
    batch: StepBatch, layout: KvLayout, device: torch.device, plan: Callable[[AttentionBatch], AttentionPlan]
) -> GroupPlans:
    """Plan a step's attention for each layer group.

    Args:
        batch: the step.
        layout: layout of the pages, which has windows.
        device: device of the pages.
        plan: plans the attention of a batch; see `Ops.plan_attention`.
    """
    groups, plans, slots = layout.groups, list[AttentionPlan](), list[torch.Tensor]()
    tables = (batch.block_tables, *batch.further_tables)
    for window, table, rows in zip(groups.windows, tables, (batch.slots, *batch.further_slots), strict=True):
        slots.append(to_device(torch.from_numpy(rows), device))
        contexts, cut = _within(window, batch, table, layout.block_tokens)
        plans.append(plan(AttentionBatch(batch.queries, contexts, cut, slots[-1], trees_of(batch))))
    return GroupPlans(groups.places, tuple(plans), tuple(slots))


def _within(window: int | None, batch: StepBatch, table: Ints, block_tokens: int) -> tuple[Ints, Ints]:
    """Return the context lengths and block tables of sequences without the blocks behind a window."""
    if window is None:
        return batch.contexts, table
    firsts = np.maximum(0, batch.contexts - batch.queries + 1 - window) // block_tokens
    contexts = batch.contexts - firsts * block_tokens
    counts = -(-contexts // block_tokens)
    cut = np.zeros((len(table), int(counts.max())), np.int64)
    for row, (first, count) in enumerate(zip(firsts.tolist(), counts.tolist(), strict=True)):
        cut[row, :count] = table[row, first : first + count]
    return contexts, cut
