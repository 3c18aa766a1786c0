"""Interface between model and runner, independent of the kernels: `Model` and its `Logits`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.engine.execute.tensors.batch import StepBatch
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.schedule.step.adapter_slots import PackedAdapter
from kvferry.weights.adapters.adapter_folder import Adapter
from kvferry.weights.config import ModelConfig

LATENT_TAKES_NO_ADAPTERS = "adapters are not supported for models with latent attention; merge them into the weights"
"""`Model.why_no_adapters` of such models."""


class LogitRows(Protocol):
    """Logits [R, vocabulary] float32: a host array, or rows on a device that are copied to the host on access."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> npt.NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """Logits of the rows that the batch names (`StepBatch.sample_rows`), in order."""

    values: LogitRows
    greedy: list[int]
    """[R]: argmax of each row, the lowest id on a tie."""
    finite: list[bool]
    """[R]: whether all logits of the row are finite."""
    hidden: npt.NDArray[np.float32] | None = None
    """[H, hidden]: hidden states after the final norm of the rows that the batch names (`StepBatch.hidden_rows`), in
    order; `None` without such rows."""
    tapped: npt.NDArray[np.float32] | None = None
    """[T, layers * hidden]: inputs of the layers that the batch names (`StepBatch.tapped_layers`), for all rows, before
    any norm; `None` without such layers."""

    def of_rows(self, rows: Sequence[int]) -> "Logits":
        """Return the logits of some rows as a view of the same memory."""
        return Logits(_ChosenRows(self.values, rows), [self.greedy[r] for r in rows], [self.finite[r] for r in rows])


@dataclass(frozen=True, slots=True)
class _ChosenRows:
    """Some rows of logits."""

    values: LogitRows
    rows: Sequence[int]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int, /) -> npt.NDArray[np.float32]:
        return self.values[self.rows[row]]


class Model(Protocol):
    """A model on one device: its parameters and its forward pass, without request state."""

    @property
    def config(self) -> ModelConfig:
        """Configuration of the model."""
        ...

    @property
    def dtype(self) -> str:
        """Data type of the KV pages, one of `core.dtypes.DTYPES`."""
        ...

    @property
    def device(self) -> str:
        """Device of the KV pages, as a torch device string."""
        ...

    @property
    def kernels(self) -> str:
        """Kernels of the model: a torch backend, or the compiled kernels with their level."""
        ...

    @property
    def rounds_inputs(self) -> bool:
        """Whether the inputs of products with quantized weights are rounded to 8 bits."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight matrices that a step of one row reads: all matrices except those of inactive experts."""
        ...

    @property
    def has_layer_groups(self) -> bool:
        """Whether the kernels support layer groups whose pages behind a window are released."""
        ...

    @property
    def why_no_adapters(self) -> str | None:
        """Reason why the model's kernels do not support adapters, with a remedy; `None` if they do."""
        ...

    def pack_adapter(self, adapter: Adapter) -> PackedAdapter:
        """Convert an adapter to the form that the kernels read. Thread-safe; does not change the model.

        Args:
            adapter: an adapter of this model.
        """
        ...

    def compute(self, batch: StepBatch, kv: PagedKv) -> Logits:
        """Compute one step: write keys and values of every row to its page, and return the logits of the sampled
        rows and the hidden states of the pooled rows.

        They are valid until the next call from the same thread, which may reuse their memory.

        Args:
            batch: rows, positions, rows per sequence and block tables.
            kv: pages of the model's shape and dtype, on its device.
        """
        ...
