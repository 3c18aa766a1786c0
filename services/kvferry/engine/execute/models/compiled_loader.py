"""Packs the weights of a model, or of a head, for the compiled CPU kernels.

Gate and up rows are interleaved in panels of 16, so that the thread that computes a gate value also computes the
corresponding up value.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import ModelFileError
from kvferry.engine.execute.models.compiled_latent import transposed_keys, value_rows
from kvferry.engine.execute.models.rotary import rotary_table
from kvferry.kernels import compiled
from kvferry.kernels.compiled import Arena
from kvferry.weights.config import Latent, LayerRope, ModelConfig, Scoring
from kvferry.weights.tensors import (
    CORRECTION,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    ROUTER,
    ROUTER_BIAS,
    SHARED,
    SHARED_GATE,
    SINKS,
    Stored,
    TensorSource,
    expert_prefix,
    layer_norms,
    layer_prefix,
)

if TYPE_CHECKING:
    from kvferry.kernels._cpu import Matrix

_PANEL = 16
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Parts = dict[str, "Matrix | Floats | None"]
LayerParts = dict[str, "Matrix | Floats | int | dict[str, object] | None"]


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A matrix that has not been packed yet."""

    matrix: "Matrix"
    names: tuple[str, ...]
    stored: list[Stored]
    order: Ints
    bias: Floats | None


class ArenaLoader:
    """Loader that reads every tensor once and packs the matrices into one arena."""

    def __init__(self, config: ModelConfig, tensors: TensorSource, form: str) -> None:
        self._config = config
        self._tensors = tensors
        self._form = form
        self._waiting: list[_Pending] = []
        self._angles: dict[LayerRope, tuple[Floats, Floats]] = {}
        self.num_bytes = 0
        self.idle_bytes = 0
        """Bytes of the experts that are not active for a row."""
        self.has_codes = False
        self.of_vocabulary: tuple[Matrix, Matrix]
        """Embedding and output head of a loaded model."""

    def load(self) -> tuple[Parts, list[LayerParts]]:
        config = self._config
        embedding = self.matrix((EMBEDDING,), config.hidden_size)
        head = embedding if config.tie_word_embeddings else self.matrix((HEAD,), config.hidden_size)
        layers = [self.layer(index) for index in range(config.num_layers)]
        self.of_vocabulary = embedding, head
        norm = self._norm(FINAL_NORM)
        head_norm = norm * np.float32(config.logit_scale)
        self.pack()
        return {"embedding": embedding, "head": head, "final_norm": norm, "head_norm": head_norm}, layers

    def pack(self) -> None:
        """Pack all described matrices.

        Raises:
            ModelFileError: a weight is not finite.
        """
        self.num_bytes = sum(compiled.aligned(pending.matrix.num_bytes) for pending in self._waiting)
        self.has_codes = any(pending.matrix.format.startswith("codes") for pending in self._waiting)
        arena = Arena(self.num_bytes)
        for pending in self._waiting:
            out = arena.take(pending.matrix.num_bytes)
            types, data = [s.type_id for s in pending.stored], [s.data for s in pending.stored]
            try:
                pending.matrix.pack(types, data, pending.order, out)
            except ArithmeticError as error:
                raise ModelFileError(
                    f"tensor {pending.names[0]!r}, or a tensor fused with it, holds {error}"
                ) from error
            pending.matrix.attach(out, pending.bias)

    def layer(self, index: int, *, width: int | None = None) -> LayerParts:
        """Describe the matrices of a layer.

        Args:
            index: the layer.
            width: number of inputs of attention in a layer without a norm on them; default: the size of the
                model's hidden state.
        """
        config, at = self._config, layer_prefix(index)
        attention, hidden = at + "self_attn.", width or config.hidden_size
        bias = tuple(f"{attention}{x}_proj.bias" for x in "qkv") if config.qkv_bias else ()
        kind = config.rope_of(index)
        if kind is not LayerRope.NONE and kind not in self._angles:
            self._angles[kind] = rotary_table(config, kind)
        cos, sin = self._angles.get(kind, (None, None))
        query_norm, key_norm = (self._norm(f"{attention}{x}_norm.weight") if config.qk_norm else None for x in "qk")
        of_heads = not config.qk_norm_spans_heads
        norms = layer_norms(config)

        def norm(name: str | None) -> Floats | None:
            return None if name is None else self._norm(at + name)

        if config.latent is None:
            inputs: LayerParts = {
                "qkv": self.matrix(tuple(f"{attention}{x}_proj.weight" for x in "qkv"), hidden, bias=bias)
            }
        else:
            inputs = self._latent(config.latent, attention)
        return {
            **inputs,
            "attention_norm": norm(norms.attention) if width is None else None,
            "q_norm": query_norm if of_heads else None,
            "k_norm": key_norm if of_heads else None,
            "q_norm_whole": None if of_heads else query_norm,
            "k_norm_whole": None if of_heads else key_norm,
            "cos": cos,
            "sin": sin,
            "window": config.window_of(index) or 0,
            "sinks": self._vector(at + SINKS) if config.attention_sinks else None,
            "output": self.matrix(
                (attention + "o_proj.weight",),
                config.attended_size,
                bias=(attention + "o_proj.bias",) if config.output_bias else (),
            ),
            "attention_output_norm": norm(norms.attention_output),
            "mlp_norm": norm(norms.mlp),
            "mlp_output_norm": norm(norms.mlp_output),
            **self._mlp_or_mixture(index),
        }

    def _latent(self, latent: Latent, at: str) -> LayerParts:
        """Describe the projections of latent attention. The key projection is transposed, so that queries can be
        multiplied by it; a quantized one becomes float32."""
        config, up = self._config, at + "kv_b_proj.weight"
        has_query_down = latent.query_rank is not None
        queries = "q_a_proj.weight" if has_query_down else "q_proj.weight"
        parts: LayerParts = {
            "qkv": self.matrix((at + queries, at + "kv_a_proj_with_mqa.weight"), config.hidden_size),
            "latent_norm": self._vector(at + "kv_a_layernorm.weight"),
            "absorb": self._add((up,), [transposed_keys(self._tensors, up, config.num_heads, latent)], latent.plain),
            "value_up": self.matrix((up,), latent.rank, order=value_rows(config.num_heads, latent)),
        }
        if latent.query_rank is not None:
            parts["query_norm"] = self._vector(at + "q_a_layernorm.weight")
            parts["query_up"] = self.matrix((at + "q_b_proj.weight",), latent.query_rank)
        return parts

    def _mlp_or_mixture(self, index: int) -> LayerParts:
        experts, at = self._config.experts_of(index), layer_prefix(index)
        if experts is None:
            gate_up, down = self._mlp(at + "mlp.", self._config.intermediate_size)
            return {"gate_up": gate_up, "down": down}
        has_gate = experts.shared_size > 0 and experts.has_shared_gate
        names = (at + ROUTER, at + SHARED_GATE) if has_gate else (at + ROUTER,)
        found = [
            self._mlp(at + expert_prefix(i), experts.intermediate_size, has_biases=experts.has_biases)
            for i in range(experts.count)
        ]
        self.idle_bytes += (
            sum(m.num_bytes for pair in found for m in pair) * (experts.count - experts.active) // (experts.count)
        )
        return {
            "mixture": {
                "router": self.matrix(
                    names, self._config.hidden_size, bias=(at + ROUTER_BIAS,) if experts.has_biases else ()
                ),
                "active": experts.active,
                "renormalizes": experts.renormalizes,
                "is_sigmoid": experts.scoring is Scoring.SIGMOID,
                "groups": experts.groups,
                "active_groups": experts.active_groups,
                "weight_scale": experts.weight_scale,
                "correction": self._vector(at + CORRECTION) if experts.scoring is Scoring.SIGMOID else None,
                "has_shared_gate": has_gate,
                "experts": found,
                "shared": self._mlp(at + SHARED, experts.shared_size) if experts.shared_size else None,
            }
        }

    def _mlp(self, at: str, inner: int, *, has_biases: bool = False) -> "tuple[Matrix, Matrix]":
        """Describe the matrices of a gated MLP or of an expert."""

        def matrix(modules: tuple[str, ...], cols: int, order: Ints | None = None) -> "Matrix":
            bias = tuple(f"{at}{module}.bias" for module in modules) if has_biases else ()
            return self.matrix(tuple(f"{at}{module}.weight" for module in modules), cols, bias=bias, order=order)

        gate_up = matrix(("gate_proj", "up_proj"), self._config.hidden_size, _alternate(inner))
        return gate_up, matrix(("down_proj",), inner)

    def _norm(self, name: str) -> Floats:
        """Read the weight of a norm, with the model family's offset."""
        return self._vector(name) + np.float32(self._config.norm_offset)

    def _vector(self, *names: str) -> Floats:
        values = np.concatenate([self._tensors.read(name).astype(np.float32, copy=True) for name in names])
        if not np.isfinite(values).all():
            raise ModelFileError(f"tensor {', '.join(map(repr, names))} holds values that are not finite")
        return values

    def matrix(
        self, names: tuple[str, ...], cols: int, *, bias: tuple[str, ...] = (), order: Ints | None = None
    ) -> "Matrix":
        """Describe one matrix that fuses several tensors with the same inputs.

        Args:
            names: the tensors, in order of their rows.
            cols: number of inputs.
            bias: names of the tensors' biases, in the same order.
            order: index of the source row for each packed row, -1 for a row of zeros; default: rows in order.
        """
        return self._add(names, [self._tensors.stored(name) for name in names], cols, bias=bias, order=order)

    def _add(
        self,
        names: tuple[str, ...],
        stored: list[Stored],
        cols: int,
        *,
        bias: tuple[str, ...] = (),
        order: Ints | None = None,
    ) -> "Matrix":
        firsts = np.cumsum([0, *(len(s.order) for s in stored)])
        rows = np.concatenate([s.order + first for s, first in zip(stored, firsts, strict=False)])
        chosen = rows if order is None else np.where(order < 0, -1, rows[order])
        try:
            matrix = compiled.make_matrix(self._form, [s.type_id for s in stored], len(chosen), cols)
        except ValueError as error:
            raise ModelFileError(f"tensors {', '.join(names)} of {cols} columns: {error}") from error
        values = None
        if bias:
            values = np.zeros(matrix.padded_rows, np.float32)
            given = self._vector(*bias)
            if order is not None:
                given = np.where(order < 0, np.float32(0), given[order])
            values[: len(given)] = given
        self._waiting.append(_Pending(matrix, names, stored, chosen, values))
        return matrix


def _alternate(intermediate: int) -> Ints:
    """Return the row order that interleaves gate and up rows in panels of 16; -1 pads the last panels."""
    panels = -(-intermediate // _PANEL)
    gates = np.full(panels * _PANEL, -1, np.int64)
    gates[:intermediate] = np.arange(intermediate)
    ups = np.where(gates < 0, -1, gates + intermediate)
    return np.stack((gates.reshape(panels, _PANEL), ups.reshape(panels, _PANEL)), axis=1).reshape(-1)
