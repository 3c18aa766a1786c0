"""A two-layer model with seeded random weights and a byte-level tokenizer; needs no file and no download.

Its output is random but deterministic text. The model is in this package rather than in the engine, since a gateway
needs its tokenizer.
"""

import hashlib
import json
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from kvferry.text.tokenizing.byte_level import CHARACTER_OF
from kvferry.text.tokenizing.tokenizer import Tokenizer
from kvferry.weights.config import ModelConfig
from kvferry.weights.tensors import EMBEDDING, F32, HEAD, Shape, Stored, expected_shapes

NAME = "tiny"
BOS, END_OF_TURN, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIALS = (END_OF_TEXT, BOS, END_OF_TURN)


def config(*, max_model_tokens: int = 2048, qk_norm: bool = False, qkv_bias: bool = False) -> ModelConfig:
    """Return the tiny model's configuration: two layers, four heads, two KV heads, 259 tokens (3 of them control
    tokens).

    Args:
        max_model_tokens: length of the context.
        qk_norm: whether queries and keys have a norm, as in Qwen3.
        qkv_bias: whether the projections have biases, as in Qwen2.
    """
    return ModelConfig(
        name=NAME,
        architecture="qwen3" if qk_norm else "qwen2" if qkv_bias else "llama",
        vocab_size=256 + len(_SPECIALS),
        hidden_size=48,
        intermediate_size=112,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_model_tokens=max_model_tokens,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        eos_token_ids=(256, 258),
        bos_token_id=257,
    )


def tokenizer(model: ModelConfig) -> Tokenizer:
    """Return the tiny model's tokenizer: ids 0 to 255 are the bytes, followed by the control tokens."""

    def make() -> tokenizers.Tokenizer:
        fast = tokenizers.Tokenizer(models.BPE(vocab={CHARACTER_OF[b]: b for b in range(256)}, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIALS])
        return fast

    return Tokenizer(
        make, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids, bos_token_id=model.bos_token_id
    )


class TinyTensors:
    """Random weights as a `TensorSource`. Each tensor depends only on the seed and its name."""

    def __init__(self, model: ModelConfig, seed: int = 0) -> None:
        self._model = model
        self._seed = seed
        self._shapes = expected_shapes(model)

    def shapes(self) -> Mapping[str, Shape]:
        """Return the shape of every tensor by name."""
        return self._shapes

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """Generate a tensor: uniform values, with a variance that keeps activations near 1 and logits distinct."""
        shape = self._shapes[name]
        key = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        uniform = np.random.Generator(np.random.PCG64(int.from_bytes(key, "little"))).random(shape, dtype=np.float32)
        centred = (uniform - np.float32(0.5)) * np.float32(math.sqrt(12.0))
        if name.endswith("norm.weight"):
            return np.float32(1.0) + np.float32(0.1) * centred
        if name == EMBEDDING:
            return centred
        gain = 3.0 if name == HEAD else 1.0
        return centred * np.float32(gain / math.sqrt(shape[-1]))

    def stored(self, name: str) -> Stored:
        """Return the rows of a tensor as F32 bytes."""
        values = self.read(name)
        return Stored.plain(F32, np.ascontiguousarray(values).view(np.uint8).reshape(-1), len(values))

    def weights(self) -> list[str]:
        """See `TensorSource.weights`."""
        return []

    def release(self) -> None:
        """Do nothing: no weights are cached."""

    def digest(self) -> str:
        """Return the SHA-256 of the configuration and the seed, which determine all weights."""
        return hashlib.sha256(json.dumps([repr(self._model), self._seed]).encode()).hexdigest()
