"""Llama-family decoder over torch tensors: Llama, SmolLM, Qwen 2 (projections with bias) and Qwen 3 (normalized heads).

Per layer, with T rows of one step's ragged batch:

    hidden -> norm -> q, k, v -> (norm) rotate q, k, write k, v to pages -> attention -> output  ┐ added to the
    hidden -> norm -> gate, up -> silu * -> down                                                  ┘ residual
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from kvferry.engine.models.model import Logits
from kvferry.engine.models.rotary import rotary_table
from kvferry.engine.models.weights import Weights, load_weights
from kvferry.engine.tensors.batch import StepBatch
from kvferry.engine.tensors.device_batch import DeviceBatch
from kvferry.engine.tensors.paged_kv import PagedKv
from kvferry.kernels.batch import AttentionBatch
from kvferry.kernels.ops import AttentionPlan, Ops, ops_for
from kvferry.model.config import ModelConfig
from kvferry.model.tensors import TensorSource, linear_weights


@torch.inference_mode()
def load_transformer(
    config: ModelConfig, tensors: TensorSource, *, dtype: str, device: str, family: str, threads: int
) -> "Transformer":
    """Load a model for a torch kernel family; sets torch's number of threads.

    Raises:
        ModelFileError: the weights do not match the configuration.
        UsageError: the family does not run on the device.
    """
    torch.set_num_threads(threads)
    ops, kind = ops_for(device, family), getattr(torch, dtype)
    weights = load_weights(config, tensors, ops, dtype=kind, device=torch.device(device))
    return Transformer(config, weights, ops, dtype=kind)


def logits_of(values: torch.Tensor) -> Logits:
    """Compute the argmax of each row, and whether all its values are finite.

    Args:
        values: [R, vocabulary] float32.
    """
    rows = values.numpy() if values.device.type == "cpu" else _DeviceRows(values)
    if not len(values):
        return Logits(rows, [], [])
    low, high = torch.aminmax(values, dim=-1)  # NaN propagates to the extremes
    finite = (low.isfinite() & high.isfinite()).tolist()
    return Logits(rows, values.argmax(dim=-1).tolist(), finite)  # the lowest id on a tie, as torch guarantees


class _DeviceRows:
    """Logits on a device; a row is copied to the host on access."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, row: int, /) -> npt.NDArray[np.float32]:
        values: npt.NDArray[np.float32] = self._values[row].cpu().numpy()
        return values


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Input rows of one step on the device."""

    token_ids: torch.Tensor
    """[T] int64: input token of each row."""
    positions: torch.Tensor
    """[T] int64: position of each row, below `max_model_tokens`."""
    slots: torch.Tensor
    """[T] int64: KV slot of each row, like `AttentionBatch.slots`."""


@dataclass(frozen=True, slots=True, eq=False)
class ForwardState:
    """State shared by the separately launched pieces of a step's forward pass."""

    pages: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    residual: torch.Tensor
    """[T, hidden]: residual stream, accumulated in place; after the last layer, the result of the forward pass."""


class Transformer:
    """Model on one device with the kernels of a torch family. Contains only parameters; call it from one thread at a
    time."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, *, dtype: torch.dtype) -> None:
        self.config = config
        self.ops = ops
        self.torch_dtype, self.torch_device = dtype, weights.embedding.device
        self.dtype, self.device = str(dtype).removeprefix("torch."), str(self.torch_device)
        self.kernels = ops.name
        self.rounds_inputs = False
        self.weight_bytes = dtype.itemsize * (linear_weights(config) + config.vocab_size * config.hidden_size)
        """Total bytes of all weight matrices, which a step reads."""
        self._weights = weights
        self._cos, self._sin = (torch.from_numpy(table).to(self.device) for table in rotary_table(config))
        self._scale = 1.0 / math.sqrt(config.head_dim)

    @torch.inference_mode()
    def compute(self, batch: StepBatch, kv: PagedKv) -> Logits:
        """See `model.Model.compute`."""
        there = DeviceBatch.of(batch, self.torch_device)
        hidden = self.forward(there.token_ids, there.positions, kv.pages, there.attention)
        logits = logits_of(self.logits(hidden, there.sample_rows))
        if there.hidden_rows is None:
            return logits
        return replace(logits, hidden=self.hidden_states(hidden, there.hidden_rows).cpu().numpy())

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, pages: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """Compute the hidden states of all rows and write their keys and values to `pages`.

        Args:
            token_ids: [T] int64.
            positions: [T] int64, each below `max_model_tokens`.
            pages: [pages, layers, 2, K, B, D] of the model's dtype.
            batch: rows per sequence and block tables.

        Returns:
            [T, hidden] before the final norm, as input of `logits`.
        """
        plan = self.ops.plan_attention(batch, pages, self.config.num_heads)
        return self.pass_through(Rows(token_ids, positions, batch.slots), pages, plan)

    def pass_through(self, rows: Rows, pages: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Run `forward` with a given attention plan, without host synchronization."""
        passage, qkv = self.enter(rows, pages)
        for index in range(self.config.num_layers):
            qkv = self.leave(index, self.attend(index, qkv, pages, plan), passage)
        return passage.residual

    def enter(self, rows: Rows, pages: torch.Tensor) -> tuple[ForwardState, torch.Tensor]:
        """Launch everything before the first attention; return the forward state and qkv [T, H + 2 K, D]."""
        residual = self.ops.embedding(rows.token_ids, self._weights.embedding)
        passage = ForwardState(
            pages=pages,
            cos=self._cos.index_select(0, rows.positions),
            sin=self._sin.index_select(0, rows.positions),
            slots=rows.slots,
            residual=residual,
        )
        normed = self.ops.rms_norm(residual, self._weights.layers[0].attention_norm, self.config.rms_norm_eps)
        return passage, self._project(0, normed, passage)

    def attend(self, index: int, qkv: torch.Tensor, pages: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Launch one layer's attention on the qkv returned by `enter` or `leave`; return [T, H * D]."""
        return self.ops.paged_attention(qkv[:, : self.config.num_heads], pages, index, plan, self._scale)

    def leave(self, index: int, seen: torch.Tensor, passage: ForwardState) -> torch.Tensor:
        """Launch everything between a layer's attention and the next layer's attention; return qkv [T, H + 2 K, D] of
        the next layer, or, after the last layer, the residual."""
        ops, eps, layers = self.ops, self.config.rms_norm_eps, self._weights.layers
        layer, residual = layers[index], passage.residual
        x = ops.add_rms_norm(layer.output(seen), residual, layer.mlp_norm, eps)
        x = layer.down(ops.silu_mul(layer.gate_up(x)))
        if index + 1 == len(layers):
            return residual.add_(x)
        return self._project(index + 1, ops.add_rms_norm(x, residual, layers[index + 1].attention_norm, eps), passage)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Compute float32 logits [R, vocabulary] of the given rows.

        Args:
            hidden: result of `forward`.
            rows: [R] int64.
        """
        return self._head(self.ops.gather_rows(hidden, rows)).float()

    def hidden_states(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Compute float32 hidden states after the final norm [H, hidden] of the given rows.

        Args:
            hidden: result of `forward`.
            rows: [H] int64.
        """
        chosen = self.ops.gather_rows(hidden, rows)
        return self.ops.rms_norm(chosen, self._weights.final_norm, self.config.rms_norm_eps).float()

    def logits_into(self, out: torch.Tensor, hidden: torch.Tensor) -> None:
        """Write the logits of all rows to `out`, [T, vocabulary] float32."""
        out.copy_(self._head(hidden))

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._weights.head(self.ops.rms_norm(hidden, self._weights.final_norm, self.config.rms_norm_eps))

    def _project(self, index: int, x: torch.Tensor, passage: ForwardState) -> torch.Tensor:
        config, layer = self.config, self._weights.layers[index]
        qkv = layer.qkv(x).view(x.shape[0], config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        self.ops.place_qkv(qkv, layer.head_norms, passage.cos, passage.sin, passage.pages, index, passage.slots)
        return qkv
