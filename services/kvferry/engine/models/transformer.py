"""The decoder of the Llama line: Llama, SmolLM, Qwen 2 (biased projections) and Qwen 3 (normed heads).

Per layer, with T rows of one step's ragged batch:

    hidden -> norm -> q, k, v -> (norm) rotate q, k, write k, v to pages -> attention -> output  ┐ added to the
    hidden -> norm -> gate, up -> silu * -> down                                                  ┘ residual
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvferry.engine.batch import StepBatch
from kvferry.engine.cache import PagedKv
from kvferry.engine.device_batch import DeviceBatch
from kvferry.engine.models.model import Logits
from kvferry.engine.models.rotary import rotary_table
from kvferry.engine.models.weights import Weights, load_weights
from kvferry.kernels.batch import AttentionBatch
from kvferry.kernels.ops import AttentionPlan, Ops, ops_for
from kvferry.model.config import ModelConfig
from kvferry.model.tensors import TensorSource, linear_weights


@torch.inference_mode()
def load_transformer(
    config: ModelConfig, tensors: TensorSource, *, dtype: str, device: str, family: str, threads: int
) -> "Transformer":
    """A model whose operations are a family over torch's tensors; torch computes on so many threads from now on.

    Raises:
        ModelFileError: the weights do not fit the configuration.
        UsageError: the family does not run on the device.
    """
    torch.set_num_threads(threads)
    ops, kind = ops_for(device, family), getattr(torch, dtype)
    weights = load_weights(config, tensors, ops, dtype=kind, device=torch.device(device))
    return Transformer(config, weights, ops, dtype=kind)


def logits_of(values: torch.Tensor) -> Logits:
    """What is to be known of these.

    Args:
        values: [R, vocabulary] float32.
    """
    rows = values.numpy() if values.device.type == "cpu" else _Elsewhere(values)
    if not len(values):
        return Logits(rows, [], [])
    low, high = torch.aminmax(values, dim=-1)  # NaN comes through as the extreme
    finite = (low.isfinite() & high.isfinite()).tolist()
    return Logits(rows, values.argmax(dim=-1).tolist(), finite)  # the first among equals, as torch promises


class _Elsewhere:
    """Rows that stay on their device until one is asked for."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, row: int, /) -> npt.NDArray[np.float32]:
        values: npt.NDArray[np.float32] = self._values[row].cpu().numpy()
        return values


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """One step's rows on the device; their number is all that the host must know of them."""

    token_ids: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int64, each below `max_model_tokens`."""
    slots: torch.Tensor
    """[T] int64, as `AttentionBatch.slots`."""


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """What the pieces of one step hand on to each other beside their results."""

    pages: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    residual: torch.Tensor
    """[T, hidden]: grows in place, and is the result once all layers have run."""


class Transformer:
    """A model on one device. Holds parameters only; calls from one thread at a time."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, *, dtype: torch.dtype) -> None:
        self.config = config
        self.ops = ops
        self.torch_dtype, self.torch_device = dtype, weights.embedding.device
        self.dtype, self.device = str(dtype).removeprefix("torch."), str(self.torch_device)
        self.kernels = ops.name
        self.rounds_inputs = False
        self.weight_bytes = dtype.itemsize * (linear_weights(config) + config.vocab_size * config.hidden_size)
        """Of all matrices, as a step reads them."""
        self._weights = weights
        self._cos, self._sin = (torch.from_numpy(table).to(self.device) for table in rotary_table(config))
        self._scale = 1.0 / math.sqrt(config.head_dim)

    @torch.inference_mode()
    def compute(self, batch: StepBatch, kv: PagedKv) -> Logits:
        """See `model.Model.compute`."""
        there = DeviceBatch.of(batch, self.torch_device)
        hidden = self.forward(there.token_ids, there.positions, kv.pages, there.attention)
        return logits_of(self.logits(hidden, there.sample_rows))

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, pages: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """Hidden states of every row; writes the rows' keys and values into `pages`.

        Args:
            token_ids: [T] int64.
            positions: [T] int64, each below `max_model_tokens`.
            pages: [pages, layers, 2, K, B, D] of the model's dtype.
            batch: which rows belong together and where their pages are.

        Returns:
            [T, hidden] before the final norm; `logits` takes them.
        """
        plan = self.ops.plan_attention(batch, pages, self.config.num_heads)
        return self.pass_through(Rows(token_ids, positions, batch.slots), pages, plan)

    def pass_through(self, rows: Rows, pages: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """`forward` by a plan that is made already; launches alone, and nothing that asks the host or the device."""
        passage, qkv = self.enter(rows, pages)
        for index in range(self.config.num_layers):
            qkv = self.leave(index, self.attend(index, qkv, pages, plan), passage)
        return passage.residual

    def enter(self, rows: Rows, pages: torch.Tensor) -> tuple[Passage, torch.Tensor]:
        """Everything before the first attention; with its [T, H + 2 K, D], of which the queries count."""
        residual = self.ops.embedding(rows.token_ids, self._weights.embedding)
        passage = Passage(
            pages=pages,
            cos=self._cos.index_select(0, rows.positions),
            sin=self._sin.index_select(0, rows.positions),
            slots=rows.slots,
            residual=residual,
        )
        normed = self.ops.rms_norm(residual, self._weights.layers[0].attention_norm, self.config.rms_norm_eps)
        return passage, self._project(0, normed, passage)

    def attend(self, index: int, qkv: torch.Tensor, pages: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """One layer's attention of the rows that `enter` or `leave` made: [T, H * D]."""
        return self.ops.paged_attention(qkv[:, : self.config.num_heads], pages, index, plan, self._scale)

    def leave(self, index: int, seen: torch.Tensor, passage: Passage) -> torch.Tensor:
        """Everything between a layer's attention and the next one's, as `enter`; after the last, the residual."""
        ops, eps, layers = self.ops, self.config.rms_norm_eps, self._weights.layers
        layer, residual = layers[index], passage.residual
        x = ops.add_rms_norm(layer.output(seen), residual, layer.mlp_norm, eps)
        x = layer.down(ops.silu_mul(layer.gate_up(x)))
        if index + 1 == len(layers):
            return residual.add_(x)
        return self._project(index + 1, ops.add_rms_norm(x, residual, layers[index + 1].attention_norm, eps), passage)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Float32 logits [R, vocabulary] of the named rows alone.

        Args:
            hidden: what `forward` returned.
            rows: [R] int64.
        """
        return self._head(self.ops.gather_rows(hidden, rows)).float()

    def logits_into(self, out: torch.Tensor, hidden: torch.Tensor) -> None:
        """The logits of all rows into memory that stands already, [T, vocabulary] float32."""
        out.copy_(self._head(hidden))

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._weights.head(self.ops.rms_norm(hidden, self._weights.final_norm, self.config.rms_norm_eps))

    def _project(self, index: int, x: torch.Tensor, passage: Passage) -> torch.Tensor:
        config, layer = self.config, self._weights.layers[index]
        qkv = layer.qkv(x).view(x.shape[0], config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        self.ops.place_qkv(qkv, layer.head_norms, passage.cos, passage.sin, passage.pages, index, passage.slots)
        return qkv
