"""Decoder over torch tensors, for all model families; their features are fields of `ModelConfig`.

Per layer, with T rows of one step's ragged batch (only some families have norms on the outputs, and some of those have
no norms on the inputs):

    hidden -> norm -> q, k, v -> (norm) rotate q, k, write k, v to pages -> attention -> output -> (norm)  ┐ added to
    hidden -> norm -> gate, up -> silu * -> down -> (norm)                                                  ┘ residual

In MoE layers, the last line is computed by each active expert of a row (`mixture`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from kvferry.core.dtypes import activation_dtype
from kvferry.engine.execute.models.group_plans import GroupPlans, group_plans
from kvferry.engine.execute.models.latent import LatentRows, LatentWeights, project
from kvferry.engine.execute.models.mixture import mix
from kvferry.engine.execute.models.model import LATENT_TAKES_NO_ADAPTERS, Logits
from kvferry.engine.execute.models.rotary import rotary_table
from kvferry.engine.execute.models.torch_adapter import (
    DOWN,
    GATE_UP,
    OUTPUT,
    QKV,
    StepAdapters,
    TorchAdapter,
    pack_adapter,
    step_adapters,
)
from kvferry.engine.execute.models.weights import MixtureOfExperts, Weights, load_weights
from kvferry.engine.execute.tensors.batch import StepBatch
from kvferry.engine.execute.tensors.device_batch import DeviceBatch
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.kernels.batch import AttentionBatch, AttentionRules, HeadNorms
from kvferry.kernels.ops import AttentionPlan, Ops, ops_for
from kvferry.kernels.unfused import clamped_swiglu
from kvferry.weights.adapters.adapter_folder import Adapter
from kvferry.weights.config import Activation, LayerRope, ModelConfig
from kvferry.weights.tensors import TensorSource, linear_weights


@torch.inference_mode()
def load_transformer(
    config: ModelConfig, tensors: TensorSource, *, dtype: str, device: str, backend: str, threads: int
) -> "Transformer":
    """Load a model for a torch kernel backend; sets torch's number of threads.

    Args:
        config: configuration of the model.
        tensors: the model's tensors.
        dtype: data type of the KV, one of `core.dtypes.DTYPES`.
        device: torch device string.
        backend: name of the kernel backend.
        threads: number of torch threads on the CPU.

    Raises:
        ModelFileError: the weights do not match the configuration.
        UsageError: the backend does not run on the device.
    """
    torch.set_num_threads(threads)
    ops, kind = ops_for(device, backend), getattr(torch, activation_dtype(dtype))
    weights = load_weights(config, tensors, ops, dtype=kind, device=torch.device(device))
    return Transformer(config, weights, ops, dtype=kind, kv_dtype=dtype)


def logits_of(values: torch.Tensor) -> Logits:
    """Compute the argmax of each row of `values`, [R, vocabulary] float32, and whether all its values are finite."""
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
    adapters: StepAdapters | None = None
    groups: GroupPlans | None = None
    """Slots of the rows in each layer group; `None` if a page has all layers."""


@dataclass(frozen=True, slots=True, eq=False)
class ForwardState:
    """State shared by the separately launched pieces of a step's forward pass."""

    pages: torch.Tensor
    angles: dict[LayerRope, tuple[torch.Tensor, torch.Tensor]]
    """Cosines and sines of the rows' positions, each [T, D], by kind of rotary embedding."""
    slots: torch.Tensor
    residual: torch.Tensor
    """[T, hidden]: residual stream, accumulated in place; after the last layer, the result of the forward pass."""
    adapters: StepAdapters | None
    groups: GroupPlans | None


class Transformer:
    """Model on one device with the kernels of a torch backend. Contains only parameters; call it from one thread at a
    time."""

    def __init__(
        self, config: ModelConfig, weights: Weights, ops: Ops, *, dtype: torch.dtype, kv_dtype: str | None = None
    ) -> None:
        """
        Args:
            config: configuration of the model.
            weights: its parameters, all on the device that computes.
            ops: operations of the kernel backend that packed the weights.
            dtype: floating-point type of weights and hidden states.
            kv_dtype: data type of the KV, one of `core.dtypes.DTYPES`; `None`: the same as `dtype`.
        """
        self.config = config
        self.ops = ops
        self.torch_dtype, self.torch_device = dtype, weights.embedding.device
        self.dtype, self.device = kv_dtype or str(dtype).removeprefix("torch."), str(self.torch_device)
        self.kernels = ops.name
        self.rounds_inputs = False
        floats = linear_weights(config) + config.vocab_size * config.hidden_size - weights.coded_values
        self.weight_bytes = dtype.itemsize * floats + weights.coded_bytes
        """See `model.Model.weight_bytes`."""
        self.weights = weights
        """The parameters."""
        self._ropes = tuple(config.rope_of(layer) for layer in range(config.num_layers))
        self._angles = {kind: _angles(config, kind, self.torch_device) for kind in dict.fromkeys(self._ropes)}
        self._rules = tuple(_rules(config, index, layer.sinks) for index, layer in enumerate(weights.layers))
        self._multiply_gate = _gate_of(config, ops)

    @torch.inference_mode()
    def compute(self, batch: StepBatch, kv: PagedKv) -> Logits:
        """See `model.Model.compute`."""
        there = DeviceBatch.of(batch, self.torch_device)
        adapters = step_adapters(batch, self.torch_device)
        taps: dict[int, torch.Tensor] = dict.fromkeys(batch.tapped_layers, there.token_ids)
        hidden = self.compute_hidden(batch, there, kv, adapters, taps)
        logits = logits_of(self.logits(hidden, there.sample_rows))
        if taps:
            tapped = torch.cat([taps[layer] for layer in batch.tapped_layers], dim=-1)
            logits = replace(logits, tapped=tapped.float().cpu().numpy())
        if there.hidden_rows is None:
            return logits
        return replace(logits, hidden=self.hidden_states(hidden, there.hidden_rows).cpu().numpy())

    def compute_hidden(
        self,
        batch: StepBatch,
        there: DeviceBatch,
        kv: PagedKv,
        adapters: StepAdapters | None,
        taps: dict[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute the hidden states of a step, [T, hidden] before the final norm, and write its keys and values.

        Args:
            batch: the step.
            there: the same batch on the device.
            kv: the pages.
            adapters: adapters of the rows.
            taps: see `pass_through`.
        """

        def planned(attention: AttentionBatch) -> AttentionPlan:
            return self.ops.plan_attention(attention, kv.pages, self.config.num_heads)

        groups = group_plans(batch, kv.layout, self.torch_device, planned) if kv.layout.windows else None
        rows = Rows(there.token_ids, there.positions, there.attention.slots, adapters, groups)
        return self.pass_through(rows, kv.pages, planned(there.attention) if groups is None else groups, taps)

    @property
    def has_layer_groups(self) -> bool:
        """See `model.Model.has_layer_groups`."""
        return self.config.latent is None

    @property
    def why_no_adapters(self) -> str | None:
        """See `model.Model.why_no_adapters`."""
        if self.config.latent is not None:
            return LATENT_TAKES_NO_ADAPTERS
        if self.ops.add_low_rank is not None:
            return None
        return f"the {self.kernels} kernels do not support adapters; use compiled kernels (--device cpu)"

    def pack_adapter(self, adapter: Adapter) -> TorchAdapter:
        """See `model.Model.pack_adapter`."""
        return pack_adapter(adapter, self.config, self.torch_dtype, self.torch_device)

    def pass_through(
        self, rows: Rows, pages: torch.Tensor, plan: AttentionPlan, taps: dict[int, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Compute the hidden states of rows with a given attention plan, without host synchronization, and write their
        keys and values to `pages`.

        Args:
            rows: the input rows.
            pages: [pages, layers of a page, 2, K, B, D] of the model's dtype.
            plan: the attention plan.
            taps: set to the inputs of the layers that are its keys, each [T, hidden], without a norm.
        """
        passage, qkv = self.enter(rows, pages)
        for index in range(self.config.num_layers):
            if taps and index in taps:
                taps[index] = passage.residual.clone()
            qkv = self.leave(index, self.attend(index, qkv, pages, plan), passage)
        return passage.residual

    def enter(self, rows: Rows, pages: torch.Tensor) -> tuple[ForwardState, torch.Tensor]:
        """Launch everything before the first attention; return the forward state and qkv [T, H + 2 K, D]."""
        residual = self.ops.embedding(rows.token_ids, self.weights.embedding)
        if self.config.embedding_scale != 1.0:
            residual = residual * self.config.embedding_scale
        norm = self.weights.layers[0].attention_norm
        normed = residual if norm is None else self.ops.rms_norm(residual, norm, self.config.rms_norm_eps)
        return self.enter_with(residual, normed, rows, pages)

    def enter_with(
        self, residual: torch.Tensor, inputs: torch.Tensor, rows: Rows, pages: torch.Tensor
    ) -> tuple[ForwardState, torch.Tensor]:
        """Launch `enter` for rows of vectors.

        Args:
            residual: [T, hidden]: residual stream before the first layer; changed in place by later launches.
            inputs: [T, inputs]: inputs of the first layer's attention.
            rows: positions and slots of the rows.
            pages: see `pass_through`.
        """
        passage = ForwardState(
            pages=pages,
            angles={
                kind: (cos.index_select(0, rows.positions), sin.index_select(0, rows.positions))
                for kind, (cos, sin) in self._angles.items()
            },
            slots=rows.slots,
            residual=residual,
            adapters=rows.adapters,
            groups=rows.groups,
        )
        return passage, self._project(0, inputs, passage)

    def attend(self, index: int, qkv: torch.Tensor, pages: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Launch one layer's attention.

        Args:
            index: index of the layer.
            qkv: [T, H + 2 K, D], returned by `enter` or `leave`.
            pages: KV pages of the engine.
            plan: attention plan of the step.

        Returns:
            The attention output, [T, H * D].
        """
        queries, rules = qkv[:, : self.config.num_heads], self._rules[index]
        weights = self.weights.layers[index].qkv
        if isinstance(plan, GroupPlans):
            index, plan = plan.plan_of(index)
        if isinstance(weights, LatentWeights):
            assert self.ops.attend_latent is not None
            return self.ops.attend_latent(queries, weights.up, pages, index, plan, rules.scale)
        if rules.is_plain:
            return self.ops.paged_attention(queries, pages, index, plan, rules.scale)
        return self.ops.attend(queries, pages, index, plan, rules)

    def leave(self, index: int, seen: torch.Tensor, passage: ForwardState) -> torch.Tensor:
        """Launch everything between a layer's attention and the next layer's attention; return qkv [T, H + 2 K, D] of
        the next layer, or, after the last layer, the residual."""
        layers, residual = self.weights.layers, passage.residual
        layer = layers[index]
        out = self._adapted(layer.output(seen), seen, index, OUTPUT, passage)
        x = self._add(out, layer.attention_output_norm, residual, layer.mlp_norm)
        if isinstance(layer.mlp, MixtureOfExperts):
            assert self.config.experts is not None
            x = mix(x, layer.mlp, self.config.experts, self._multiply_gate, self.ops)
        else:
            x = self._multiply_gate(self._adapted(layer.mlp.gate_up(x), x, index, GATE_UP, passage))
            x = self._adapted(layer.mlp.down(x), x, index, DOWN, passage)
        if index + 1 == len(layers):
            return self._add(x, layer.mlp_output_norm, residual, None)
        x = self._add(x, layer.mlp_output_norm, residual, layers[index + 1].attention_norm)
        return self._project(index + 1, x, passage)

    def _add(
        self, x: torch.Tensor, norm: torch.Tensor | None, residual: torch.Tensor, next_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """Add an output to the residual IN PLACE, after its norm and scale if the model has them; return the residual
        after `next_norm`, or the residual itself without one."""
        if norm is not None:
            x = self.ops.rms_norm(x, norm, self.config.rms_norm_eps)
        if self.config.residual_scale != 1.0:
            x = x * self.config.residual_scale
        if next_norm is None:
            return residual.add_(x)
        return self.ops.add_rms_norm(x, residual, next_norm, self.config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Compute float32 logits [R, vocabulary] of `rows`, [R] int64, of `hidden`, the result of `pass_through`."""
        return self._head(self.ops.gather_rows(hidden, rows)).float()

    def hidden_states(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Compute float32 hidden states after the final norm [H, hidden] of the given rows.

        Args:
            hidden: result of `pass_through`.
            rows: [H] int64.
        """
        chosen = self.ops.gather_rows(hidden, rows)
        return self.ops.rms_norm(chosen, self.weights.final_norm, self.config.rms_norm_eps).float()

    def logits_into(self, out: torch.Tensor, hidden: torch.Tensor) -> None:
        """Write the logits of all rows to `out`, [T, vocabulary] float32."""
        out.copy_(self._head(hidden))

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        config = self.config
        logits = self.weights.head(self.ops.rms_norm(hidden, self.weights.final_norm, config.rms_norm_eps))
        if config.logit_scale != 1.0:
            logits = logits * config.logit_scale
        if config.logit_soft_cap is not None:
            logits = torch.tanh(logits.float() / config.logit_soft_cap) * config.logit_soft_cap
        return logits

    def _project(self, index: int, x: torch.Tensor, passage: ForwardState) -> torch.Tensor:
        config, layer = self.config, self.weights.layers[index]
        cos, sin = passage.angles[self._ropes[index]]
        if isinstance(layer.qkv, LatentWeights):
            assert config.latent is not None
            place = LatentRows(passage.pages, index, passage.slots, cos, sin)
            return project(x, layer.qkv, config.latent, config.num_heads, self.ops, place)
        flat = self._adapted(layer.qkv(x), x, index, QKV, passage)
        if layer.whole_norms is not None:
            self._norm_projections(flat, layer.whole_norms)
        qkv = flat.view(x.shape[0], config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        at, slots = (index, passage.slots) if passage.groups is None else passage.groups.slots_of(index)
        self.ops.place_qkv(qkv, layer.head_norms, cos, sin, passage.pages, at, slots)
        return qkv

    def _adapted(self, y: torch.Tensor, x: torch.Tensor, index: int, name: str, passage: ForwardState) -> torch.Tensor:
        """Add the updates of adapters to a projection's outputs IN PLACE, and return them."""
        if passage.adapters is not None:
            assert self.ops.add_low_rank is not None
            self.ops.add_low_rank(y, x, passage.adapters.of(index, name))
        return y

    def _norm_projections(self, qkv: torch.Tensor, norms: HeadNorms) -> None:
        """Normalize all query heads of a row together, and all key heads, IN PLACE: qkv [T, (H + 2 K) * D]."""
        config = self.config
        middle = config.num_heads * config.head_dim
        for part, weight in (
            (qkv[:, :middle], norms.query),
            (qkv[:, middle : middle + config.num_kv_heads * config.head_dim], norms.key),
        ):
            part.copy_(self.ops.rms_norm(part, weight, norms.epsilon))


def _angles(config: ModelConfig, kind: LayerRope, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rotary_table(config, kind)
    if kind is LayerRope.NONE:  # one row for all positions
        return (
            torch.tensor(cos[:1], device=device).expand(cos.shape),
            torch.tensor(sin[:1], device=device).expand(sin.shape),
        )
    return torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)


def _rules(config: ModelConfig, layer: int, sinks: torch.Tensor | None) -> AttentionRules:
    return AttentionRules(config.score_scale, config.window_of(layer), config.attention_soft_cap, sinks)


def _gate_of(config: ModelConfig, ops: Ops) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that multiplies the activation of the gate half by the up half: [T, 2 n] to [T, n]."""
    if config.activation is Activation.CLAMPED_SWIGLU:
        return partial(clamped_swiglu, alpha=config.swiglu_alpha, limit=config.swiglu_limit)
    return ops.silu_mul if config.activation is Activation.SILU else ops.gelu_mul
