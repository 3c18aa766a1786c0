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
from kvferry.engine.models.model import Logits
from kvferry.engine.models.rotary import rotary_table
from kvferry.engine.models.weights import LayerWeights, Weights, load_weights
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
class _Step:
    """What every layer of one step shares."""

    pages: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    plan: AttentionPlan


class Transformer:
    """A model on one device. Holds parameters only; calls from one thread at a time."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, *, dtype: torch.dtype) -> None:
        self.config = config
        self.ops = ops
        self.dtype = str(dtype).removeprefix("torch.")
        self.device = str(weights.embedding.device)
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
        tokens, positions, slots, rows = (
            torch.from_numpy(each).to(self.device)
            for each in (batch.token_ids, batch.positions, batch.slots, batch.sample_rows)
        )
        attention = AttentionBatch(batch.queries, batch.contexts, batch.block_tables, slots)
        hidden = self.forward(tokens, positions, kv.pages, attention)
        return logits_of(self.logits(hidden, rows))

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
        ops, eps = self.ops, self.config.rms_norm_eps
        step = _Step(
            pages=pages,
            cos=self._cos.index_select(0, positions),
            sin=self._sin.index_select(0, positions),
            slots=batch.slots,
            plan=ops.plan_attention(batch, pages, self.config.num_heads),
        )
        residual = ops.embedding(token_ids, self._weights.embedding)
        layers = self._weights.layers
        x = ops.rms_norm(residual, layers[0].attention_norm, eps)
        for index, layer in enumerate(layers):
            x = ops.add_rms_norm(self._attend(x, layer, index, step), residual, layer.mlp_norm, eps)
            x = layer.down(ops.silu_mul(layer.gate_up(x)))
            if index + 1 < len(layers):
                x = ops.add_rms_norm(x, residual, layers[index + 1].attention_norm, eps)
        return residual.add_(x)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Float32 logits [R, vocabulary] of the named rows alone.

        Args:
            hidden: what `forward` returned.
            rows: [R] int64.
        """
        last = self.ops.gather_rows(hidden, rows)
        normed = self.ops.rms_norm(last, self._weights.final_norm, self.config.rms_norm_eps)
        return self._weights.head(normed).float()

    def _attend(self, x: torch.Tensor, layer: LayerWeights, index: int, step: _Step) -> torch.Tensor:
        config, ops = self.config, self.ops
        heads, all_heads = config.num_heads, config.num_heads + 2 * config.num_kv_heads
        qkv = layer.qkv(x).view(x.shape[0], all_heads, config.head_dim)
        ops.place_qkv(qkv, layer.head_norms, step.cos, step.sin, step.pages, index, step.slots)
        seen = ops.paged_attention(qkv[:, :heads], step.pages, index, step.plan, self._scale)
        return layer.output(seen)
