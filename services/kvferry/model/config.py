"""The model configuration, read from the model's files: all parameters of the computation and of the KV layout."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """RoPE frequency scaling of Llama 3.1 and later; the values of `rope_scaling` in config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Configuration of a decoder-only transformer of the Llama family (Llama, SmolLM, Qwen 2 and 3)."""

    name: str
    """Model name for clients."""
    architecture: str
    """Model family: `llama`, `qwen2` or `qwen3`."""
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
    rope_scaling: Llama3RopeScaling | None = None
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
