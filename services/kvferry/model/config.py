"""What a model is, as numbers: everything that shapes computation and KV, read from the model's own files."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1 and later; values from `config.json`, field `rope_scaling`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only transformer of the Llama line (Llama, SmolLM, Qwen 2 and 3)."""

    name: str
    """What clients call it."""
    architecture: str
    """`llama`, `qwen2` or `qwen3`."""
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
    """Context length the model was trained for, prompt and output together."""
    rope_scaling: Llama3RopeScaling | None = None
    tie_word_embeddings: bool = False
    """Whether the output head is the embedding matrix."""
    qkv_bias: bool = False
    """Qwen 2: query, key and value projections have a bias."""
    qk_norm: bool = False
    """Qwen 3: queries and keys are RMS-normalised per head before rotation."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    """Prepended to plain-text prompts when the tokenizer says so; `None`: the model has none."""
