"""What the bytes of a page mean, and the fingerprint by which two engines know that they agree.

A page holds one block of tokens for all layers, so that it is one contiguous range, one descriptor, one object:

    [layer][K, V][kv_head][token][head_dim]        one page, `block_bytes` long
    |------------------- block-major: page i starts at i * block_bytes -------------------|

Equal fingerprints mean that a raw copy of a page is right. Anything that changes the meaning of a byte
changes the fingerprint; VERSION counts changes that no field shows:

    1   first form: block-major, K then V, heads before tokens, keys stored rotated (half-split rotary)
"""

from dataclasses import dataclass

from blake3 import blake3

VERSION = 1
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape and meaning of one engine's pages."""

    model_digest: str
    """Digest of the weights and of what shapes computation; other weights mean other KV."""
    dtype: str
    """Of the KV: `float32`, `bfloat16` or `float16`. Keys and values are computed in it too."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers: 2 x layers x kv heads x head dim x bytes an element."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one page."""
        return self.token_bytes * self.block_tokens

    @property
    def fingerprint(self) -> bytes:
        """16 bytes; equal exactly when pages are interchangeable byte for byte."""
        text = (
            f"kvferry-kv-layout v{VERSION} order=block,layer,kv,head,token,dim "
            f"model={self.model_digest} dtype={self.dtype} layers={self.num_layers} "
            f"kv_heads={self.num_kv_heads} head_dim={self.head_dim} block={self.block_tokens}"
        )
        return blake3(text.encode()).digest(length=16)
