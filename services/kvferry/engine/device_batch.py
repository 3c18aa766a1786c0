"""A step's arrays where torch computes."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvferry.engine.batch import StepBatch
from kvferry.kernels.batch import AttentionBatch


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBatch:
    """Of `StepBatch`, what is on the device; plans of attention are made from the host's."""

    token_ids: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int64."""
    attention: AttentionBatch
    sample_rows: torch.Tensor
    """[R] int64."""

    @classmethod
    def of(cls, batch: StepBatch, device: torch.device) -> "DeviceBatch":
        """The same step there; nothing waits for the copies."""

        def moved(values: npt.NDArray[np.int64]) -> torch.Tensor:
            return to_device(torch.from_numpy(values), device)

        attention = AttentionBatch(batch.queries, batch.contexts, batch.block_tables, moved(batch.slots))
        return cls(moved(batch.token_ids), moved(batch.positions), attention, moved(batch.sample_rows))


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy that the host does not wait for; torch keeps the pinned memory until it is done."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=device.type == "cuda")
