"""Batch arrays on a torch device, copied without synchronization."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvferry.engine.execute.tensors.batch import StepBatch
from kvferry.kernels.batch import AttentionBatch, Trees


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBatch:
    """The arrays of a `StepBatch` on a device. `attention` also has the host arrays that are used to plan attention."""

    token_ids: torch.Tensor
    """[T] int64: input token of each row."""
    positions: torch.Tensor
    """[T] int64: position of each row in its sequence."""
    attention: AttentionBatch
    sample_rows: torch.Tensor
    """[R] int64: indices of the rows whose logits are needed; see `StepBatch.sample_rows`."""
    hidden_rows: torch.Tensor | None
    """[H] int64: indices of the rows whose hidden states are needed; `None` without such rows."""

    @classmethod
    def of(cls, batch: StepBatch, device: torch.device) -> "DeviceBatch":
        """Copy a batch to the device, asynchronously."""

        def moved(values: npt.NDArray[np.int64]) -> torch.Tensor:
            return to_device(torch.from_numpy(values), device)

        attention = AttentionBatch(
            batch.queries, batch.contexts, batch.block_tables, moved(batch.slots), trees_of(batch)
        )
        hidden_rows = moved(batch.hidden_rows) if len(batch.hidden_rows) else None
        return cls(moved(batch.token_ids), moved(batch.positions), attention, moved(batch.sample_rows), hidden_rows)


def trees_of(batch: StepBatch) -> Trees | None:
    """Return the trees of a batch; `None` without any."""
    return Trees(batch.trees, batch.paths) if len(batch.trees) else None


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to the device asynchronously; torch keeps the pinned memory until the copy is complete.

    Args:
        host: tensor of any shape and dtype in host memory.
        device: the target; the CPU returns `host` itself.
    """
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=device.type == "cuda")
