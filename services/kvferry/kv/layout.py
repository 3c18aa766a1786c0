"""What the bytes of a page mean, and the fingerprint by which two engines know that they agree.

A page holds one block of tokens for all layers, so that it is one contiguous range, one descriptor, one object:

    [layer][K, V][kv_head][token][head_dim]        one page, `block_bytes` long
    |------------------- block-major: page i starts at i * block_bytes -------------------|

In int8 a head's tokens are [token][head_dim] codes, and behind them [token] scales in float32, little-endian; a value
is code * scale (`core.dtypes`).

Equal fingerprints mean that a raw copy of a page is right; what unequal ones need, `relayout` plans. Anything that
changes the meaning of a byte changes the fingerprint; VERSION counts changes that no field shows:

    1   first form: block-major, K then V, heads before tokens, keys stored rotated (half-split rotary)
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

from blake3 import blake3

from kvferry.core.dtypes import DTYPES, row_bytes

VERSION = 1
_MAX_DIGEST_CHARS = 256
_MAX_COUNT = 1 << 20
_MAX_BLOCK_BYTES = 1 << 32

Description = tuple[int | str, ...]
"""A layout as plain values: VERSION, then the fields in their order; a share of the heads has all of them."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape and meaning of one engine's pages."""

    model_digest: str
    """Digest of the weights and of what shapes computation; other weights mean other KV."""
    dtype: str
    """Of the KV, a name of `core.dtypes.DTYPES`."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    head_start: int = 0
    """Which of the model's KV heads is the first one here."""
    total_kv_heads: int | None = None
    """The model's KV heads; `None`: all of them are here, which is also what an equal number becomes."""

    def __post_init__(self) -> None:
        """Check the share, and give one whole one form.

        Raises:
            ValueError: the model has no such heads.
        """
        total = self.num_kv_heads if self.total_kv_heads is None else self.total_kv_heads
        if not 0 <= self.head_start <= total - self.num_kv_heads:
            raise ValueError(f"heads {self.head_start} to {self.heads.stop} of {total}: the model has no such heads")
        if total == self.num_kv_heads:
            object.__setattr__(self, "total_kv_heads", None)

    @property
    def heads(self) -> range:
        """The KV heads that are here, numbered as in the model."""
        return range(self.head_start, self.head_start + self.num_kv_heads)

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers: 2 x layers x kv heads x (head dim x bytes an element, and a scale)."""
        return 2 * self.num_layers * self.num_kv_heads * row_bytes(self.dtype, self.head_dim)

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
        if self.total_kv_heads is not None:
            text += f" head_start={self.head_start} total_kv_heads={self.total_kv_heads}"
        return blake3(text.encode()).digest(length=16)

    @property
    def family(self) -> bytes:
        """16 bytes; equal only where a page of one can be converted into the other's: model and heads, no more."""
        text = (
            f"kvferry-kv-family v{VERSION} model={self.model_digest} layers={self.num_layers} "
            f"kv_heads={self.num_kv_heads} head_dim={self.head_dim} "
            f"head_start={self.head_start} total_kv_heads={self.total_kv_heads}"
        )
        return blake3(text.encode()).digest(length=16)

    @property
    def description(self) -> Description:
        """All of it as plain values, for messages; `described` reads it."""
        whole = astuple(self)
        return (VERSION, *(whole[:_SHARED] if self.total_kv_heads is None else whole))


_SHARED = len(fields(KvLayout)) - 2
"""Fields that a layout of all heads has values of its own for."""


def described(description: Sequence[object]) -> KvLayout:
    """The layout that `KvLayout.description` speaks of.

    Raises:
        ValueError: it is of another version, has a field too few, or one that no layout has.
    """
    version, *values = description or (0,)
    if version != VERSION or len(values) not in {_SHARED, _SHARED + 2}:
        raise ValueError(f"a layout of version {version!r} with {len(values)} fields; this worker reads {VERSION}")
    digest, dtype, *counts = values
    if not isinstance(digest, str) or len(digest) > _MAX_DIGEST_CHARS or dtype not in DTYPES:
        raise ValueError(f"a layout with dtype {dtype!r}; known are {', '.join(DTYPES)}")
    checked = [c for c in counts if isinstance(c, int) and 0 <= c <= _MAX_COUNT]
    if checked != counts or min(checked[: _SHARED - 2]) < 1:
        raise ValueError(f"a layout with a count out of 1 to {_MAX_COUNT}")
    made = KvLayout(digest, str(dtype), *checked)
    if made.block_bytes > _MAX_BLOCK_BYTES:
        raise ValueError(f"a layout with pages of {made.block_bytes} bytes; at most {_MAX_BLOCK_BYTES} are accepted")
    return made
