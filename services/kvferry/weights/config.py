"""The model configuration, read from the model's files: all parameters that determine the computation and the KV
layout."""

import math
from dataclasses import dataclass, replace
from enum import Enum

from kvferry.weights.rope import DynamicNtkRope, LongRope, RopeScaling


class NormPlacement(Enum):
    """Positions of a layer's norms: on the inputs of attention and MLP, on their outputs, or on both."""

    BEFORE = "before"
    AFTER = "after"
    BOTH = "both"


class Activation(Enum):
    """Activation of the gated MLP, a function of the gate and up values g and u: SiLU(g) u, GELU(g) u in its tanh
    approximation, or, with g and u clamped to a limit (g only from above), g sigmoid(alpha g) (u + 1) (gpt-oss)."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    CLAMPED_SWIGLU = "clamped_swiglu"


class LayerRope(Enum):
    """Rotary embedding of a layer: the model's, the one for layers with a sliding window, or none."""

    FULL = "full"
    LOCAL = "local"
    NONE = "none"


class Scoring(Enum):
    """Scores of a router's outputs: softmax over all experts, or a sigmoid of each, to which a correction per expert is
    added for the choice alone (DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 2.1.2)."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention (DeepSeek-AI, DeepSeek-V2, 2024, section 2.1): pages have a vector of `rank` values per token,
    from which the keys and values of all heads are projected, and the `rotated` values of the key that all heads
    share."""

    rank: int
    rotated: int
    """Values of a head that are rotated, the last ones of queries and keys."""
    plain: int
    """Values of a query or key head that are not rotated."""
    value: int
    """Values of a value head."""
    query_rank: int | None
    """Size of the vector from which queries are projected; `None` if they are projected from the hidden state."""
    is_interleaved: bool = True
    """Whether the files store the two values of a rotary pair next to each other, instead of `rotated` / 2 apart."""

    @property
    def width(self) -> int:
        """Values per token and layer in the pages."""
        return self.rank + self.rotated


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts instead of an MLP (Shazeer et al., Outrageously Large Neural Networks, 2017, section 2). A
    router computes a softmax over all experts, and each token is computed by the most probable ones.
    """

    count: int
    active: int
    """Number of experts that compute each token."""
    intermediate_size: int
    """Width of each expert."""
    renormalizes: bool
    """Whether the weights of the active experts are divided by their sum."""
    shared_size: int = 0
    """Intermediate size of the shared expert, which computes all tokens and is weighted by the sigmoid of its own gate
    (Dai et al., DeepSeekMoE, 2024, section 3.2); 0 for none.
    """
    dense_layers: tuple[int, ...] = ()
    """Layers with an MLP instead of experts."""
    has_biases: bool = False
    """Whether router and experts have biases (gpt-oss)."""
    has_shared_gate: bool = True
    """Whether the shared expert is weighted by its gate (Qwen 2-MoE), instead of by 1 (DeepSeek)."""
    scoring: Scoring = Scoring.SOFTMAX
    groups: int = 1
    """Number of equally large groups of experts; a token's experts are chosen from the best `active_groups` of them."""
    active_groups: int = 1
    weight_scale: float = 1.0
    """Factor by which the weights of the active experts are multiplied."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Configuration of a decoder-only transformer. The defaults are Llama's; `model/families` sets what differs
    in other families."""

    name: str
    """Model name for clients."""
    architecture: str
    """Name of the model family, one of `families.registry.FAMILIES`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_model_tokens: int
    """Context length for which the model was trained, in tokens, prompt and output."""
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    """Whether the output head shares the embedding matrix."""
    qkv_bias: bool = False
    """Whether query, key and value projections have a bias (Qwen 2)."""
    qk_norm: bool = False
    """Whether queries and keys are RMS-normalized per head before rotation (Qwen 3)."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    """Begin-of-sequence token, prepended to plain-text prompts if the tokenizer's configuration requires it; `None` if
    the model has no such token."""
    rotary_dim: int | None = None
    """Number of rotated values per head; `None` for all."""
    local_rope_theta: float | None = None
    """RoPE base, without scaling, of layers with a sliding window (Gemma 3); `None` if all layers rotate alike."""
    unrotated_layers: tuple[int, ...] = ()
    """Indices of the layers whose queries and keys are not rotated (SmolLM 3)."""
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer: number of positions that a token attends to, including its own; `None` for full
    attention. Empty if all layers have full attention."""
    attention_scale: float | None = None
    """Factor by which attention scores are multiplied; `None` for 1 / sqrt(head_dim)."""
    attention_soft_cap: float | None = None
    """Cap of scaled attention scores: s becomes cap * tanh(s / cap) (Gemma 2); `None` for no cap."""
    logit_soft_cap: float | None = None
    """Cap of logits, in the same form (Gemma 2); `None` for no cap."""
    embedding_scale: float = 1.0
    """Factor by which embeddings are multiplied."""
    residual_scale: float = 1.0
    """Factor by which the outputs of attention and MLP are multiplied before they are added to the residual
    (Granite)."""
    logit_scale: float = 1.0
    """Factor by which logits are multiplied (Granite)."""
    norm_placement: NormPlacement = NormPlacement.BEFORE
    norm_offset: float = 0.0
    """Value added to all norm weights (Gemma stores weight - 1)."""
    qk_norm_spans_heads: bool = False
    """Whether `qk_norm` normalizes a whole projection instead of each head (OLMo 2)."""
    activation: Activation = Activation.SILU
    swiglu_alpha: float = 1.702
    """Factor `alpha` in the sigmoid of `Activation.CLAMPED_SWIGLU`."""
    swiglu_limit: float = 7.0
    """Limit of `Activation.CLAMPED_SWIGLU`."""
    attention_sinks: bool = False
    """Whether each head has a learned score that is part of the softmax's denominator but has no value (Xiao et
    al., Efficient Streaming Language Models with Attention Sinks, 2024, in the learned form; gpt-oss)."""
    output_bias: bool = False
    """Whether the output projection of attention has a bias (gpt-oss)."""
    experts: Experts | None = None
    """Experts of the MoE layers; `None` for a dense model."""
    latent: Latent | None = None
    """Latent attention of all layers; `head_dim` is then the size of a query or key head, and `num_kv_heads` has no
    effect. `None` for models with other attention."""

    def experts_of(self, layer: int) -> Experts | None:
        """Return the experts of a layer; `None` if the layer has an MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    @property
    def projected_heads(self) -> int:
        """Heads per row of what attention is computed from: queries, keys and values, or with latent attention only
        queries."""
        return self.num_heads + (2 * self.num_kv_heads if self.latent is None else 0)

    @property
    def attended_size(self) -> int:
        """Size of the attention result, the input of the output projection."""
        return self.num_heads * (self.head_dim if self.latent is None else self.latent.value)

    @property
    def inner_values(self) -> int:
        """Maximum number of intermediate activations per row in an MLP or an MoE layer."""
        dense, experts = 3 * self.intermediate_size, self.experts
        if experts is None:
            return dense
        of_pair = 3 * experts.intermediate_size + self.hidden_size
        return max(dense, experts.active * of_pair + 3 * experts.shared_size + self.hidden_size + 4 * experts.count)

    @property
    def score_scale(self) -> float:
        """Factor by which attention scores are multiplied."""
        return 1.0 / math.sqrt(self.head_dim) if self.attention_scale is None else self.attention_scale

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window of a layer in tokens; `None` for full attention."""
        return self.windows[layer] if self.windows else None

    def rope_of(self, layer: int) -> LayerRope:
        """Return which rotary embedding a layer uses."""
        if layer in self.unrotated_layers:
            return LayerRope.NONE
        return LayerRope.LOCAL if self.local_rope_theta is not None and self.window_of(layer) else LayerRope.FULL

    @property
    def rope_depends_on_length(self) -> bool:
        """Whether the rotary frequencies depend on the served context length."""
        return isinstance(self.rope_scaling, DynamicNtkRope | LongRope)

    def served(self, tokens: int | None) -> "ModelConfig":
        """Return the configuration for a served context of `tokens` tokens, if the context changes the computation:
        frequencies that depend on the length are computed for this context, and windows at least as long as the context
        are left out. Otherwise, and for `None` or 0, return the configuration unchanged."""
        if not tokens or tokens >= self.max_model_tokens:
            return self._without_idle_windows(self.max_model_tokens)
        short = self._without_idle_windows(tokens)
        return replace(short, max_model_tokens=tokens) if self.rope_depends_on_length or short != self else self

    def _without_idle_windows(self, tokens: int) -> "ModelConfig":
        if self.local_rope_theta is not None or not self.windows:
            return self
        windows = tuple(w if w is not None and w < tokens else None for w in self.windows)
        return replace(self, windows=windows if any(windows) else ())
