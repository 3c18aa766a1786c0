"""Shares of a model for tensor parallelism: which heads, inner values and tokens each rank computes, and which rows or
columns of each tensor it therefore holds.

    rows      q, k, v (by heads), gate, up (by inner values), embedding and output head (by tokens)
    columns   o (by heads), down (by inner values): each rank's product is one part of a sum
    whole     norms, routers, and what latent vectors are computed from
    rank 0    biases of o and down, which are added to the sum once

(Shoeybi et al., Megatron-LM, 2019, section 3.) With fewer KV heads than ranks, several ranks compute the same KV head.
"""

import re
from dataclasses import dataclass, replace

from kvferry.core.errors import UsageError
from kvferry.weights.config import Experts, ModelConfig
from kvferry.weights.tensors import CORRECTION, EMBEDDING, HEAD, ROUTER, ROUTER_BIAS, SHARED_GATE, SINKS, Shape

MAX_RANKS = 64
_PANEL = 16
"""Outputs that the kernels compute together; shares of the vocabulary are multiples of it."""
_LAYER = re.compile(r"model\.layers\.\d+\.")
_EXPERT = re.compile(r"mlp\.(experts\.\d+|shared_expert)\.")


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of a model."""

    rank: int
    size: int
    """Number of ranks."""

    def part_of(self, count: int) -> range:
        """Return this rank's part of `count` equal items, which the number of ranks divides."""
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def kv_heads_of(self, count: int) -> range:
        """Return this rank's KV heads: a part of them, or one that it shares with its neighbours."""
        if count >= self.size:
            return self.part_of(count)
        head = self.rank * count // self.size
        return range(head, head + 1)

    def tokens_of(self, count: int) -> range:
        """Return the token ids of this rank's part of a vocabulary, in whole panels; empty if there are too few."""
        panels = -(-count // _PANEL)
        begin, end = (part * panels // self.size * _PANEL for part in (self.rank, self.rank + 1))
        return range(begin, min(end, count))


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a tensor that a rank holds."""

    rows: range | None = None
    """Indices along the first axis; `None` for all."""
    columns: range | None = None
    """Indices along the second axis; `None` for all."""
    is_zero: bool = False
    """Whether the rank holds zeros instead, because another rank adds the values."""

    def shape_of(self, shape: Shape) -> Shape:
        """Return the shape of the part of a tensor with the given shape."""
        first = shape[0] if self.rows is None else len(self.rows)
        if self.columns is not None:
            return (first, len(self.columns))
        return (first, *shape[1:])


def check_divides(config: ModelConfig, size: int) -> None:
    """Check that a model can be divided among ranks, before any weight is read.

    Args:
        config: configuration of the model.
        size: number of ranks.

    Raises:
        UsageError: a size of the model is not a multiple of the number of ranks, or a layer needs whole rows.
    """
    if size == 1:
        return
    if config.qk_norm and config.qk_norm_spans_heads:
        raise _refused(f"queries of {config.architecture} are normalized over all heads together", size)
    sizes = {"num_attention_heads": config.num_heads}
    if len(config.experts.dense_layers if config.experts else range(config.num_layers)):
        sizes["intermediate_size"] = config.intermediate_size
    if config.experts is not None:
        sizes["moe_intermediate_size"] = config.experts.intermediate_size
        if config.experts.shared_size:
            sizes["shared_expert_intermediate_size"] = config.experts.shared_size
    for name, value in sizes.items():
        if value % size:
            raise _refused(f"{name} {value} is not a multiple of {size}", size)
    heads = config.num_kv_heads
    if config.latent is None and heads % size and size % heads:
        raise _refused(f"num_key_value_heads {heads} is neither a multiple nor a divisor of {size}", size)
    if -(-config.vocab_size // _PANEL) < size:
        raise _refused(f"a vocabulary of {config.vocab_size} tokens has no part for each rank", size)


def _refused(reason: str, size: int) -> UsageError:
    message = f"the model cannot be divided among {size} ranks: {reason}; use fewer ranks, or 1"
    return UsageError(message, field="tensor_parallel")


def config_of_share(config: ModelConfig, share: Share) -> ModelConfig:
    """Return the configuration of one rank's share: a model with fewer heads, inner values and tokens.

    Args:
        config: configuration of the model, which `check_divides` accepts.
        share: the rank's share.
    """
    experts = config.experts
    return replace(
        config,
        vocab_size=len(share.tokens_of(config.vocab_size)),
        intermediate_size=config.intermediate_size // share.size,
        num_heads=config.num_heads // share.size,
        num_kv_heads=len(share.kv_heads_of(config.num_kv_heads)),
        eos_token_ids=(),  # they are ids of the whole vocabulary, not of a part
        experts=None if experts is None else _experts_of(experts, share.size),
    )


def _experts_of(experts: Experts, size: int) -> Experts:
    return replace(
        experts, intermediate_size=experts.intermediate_size // size, shared_size=experts.shared_size // size
    )


def cut_of(name: str, config: ModelConfig, share: Share) -> Cut:
    """Return the part of a tensor that a rank holds.

    Args:
        name: name of the tensor, as in `tensors.expected_shapes`.
        config: configuration of the whole model.
        share: the rank's share.
    """
    if name in (EMBEDDING, HEAD):
        return Cut(rows=share.tokens_of(config.vocab_size))
    inner = _LAYER.sub("", name)
    if inner in (ROUTER, ROUTER_BIAS, CORRECTION, SHARED_GATE):
        return Cut()
    if inner == SINKS:
        return Cut(rows=share.part_of(config.num_heads))
    if inner.startswith("self_attn."):
        return _attention_cut(inner.removeprefix("self_attn."), config, share)
    if inner.startswith("mlp."):
        return _mlp_cut(inner, config, share)
    return Cut()


def _attention_cut(name: str, config: ModelConfig, share: Share) -> Cut:
    module, _, kind = name.partition(".")
    latent, heads = config.latent, share.part_of(config.num_heads)
    if module in ("q_proj", "q_b_proj"):
        return Cut(rows=_times(heads, config.head_dim))
    if module in ("k_proj", "v_proj"):
        return Cut(rows=_times(share.kv_heads_of(config.num_kv_heads), config.head_dim))
    if module == "kv_b_proj":
        assert latent is not None
        return Cut(rows=_times(heads, latent.plain + latent.value))
    if module == "o_proj":
        return _summed(kind, _times(heads, config.head_dim if latent is None else latent.value), share)
    return Cut()


def _mlp_cut(name: str, config: ModelConfig, share: Share) -> Cut:
    size = config.intermediate_size
    found = _EXPERT.match(name)
    if found is not None:
        assert config.experts is not None
        size = config.experts.shared_size if found[1] == "shared_expert" else config.experts.intermediate_size
    part = share.part_of(size)
    module, kind = name.rsplit(".", 2)[-2:]
    return _summed(kind, part, share) if module == "down_proj" else Cut(rows=part)


def _summed(kind: str, columns: range, share: Share) -> Cut:
    """Return the part of a projection whose outputs are summed over ranks."""
    return Cut(columns=columns) if kind == "weight" else Cut(is_zero=share.rank > 0)


def _times(items: range, size: int) -> range:
    return range(items.start * size, items.stop * size)
