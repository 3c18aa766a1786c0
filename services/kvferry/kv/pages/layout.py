"""KV page layout: shape and dtype of a page, and the fingerprint by which two engines compare layouts.

A page holds one block of tokens for all layers, and is one contiguous range and one transfer descriptor:

    [layer][K, V][kv_head][token][head_dim]        one page, `block_bytes` long
    |------------------- block-major: page i starts at i * block_bytes -------------------|

If layers are in groups by their sliding windows, a page has the layers of one group (`layer_groups`).

Models with latent attention have one vector per token and layer, from which both keys and values are computed
(DeepSeek-AI, DeepSeek-V2, 2024, section 2.1): `planes` is then 1, and a page is [layer][token][vector].

With int8, a head has [token][head_dim] integers, followed by [token] scales in float32, little-endian; a value is
integer * scale (`core.dtypes`).

Pages with equal fingerprints are copied byte for byte; `relayout` plans conversions between different layouts. Every
change of the byte format changes the fingerprint; VERSION counts the changes that are not visible in a field:

    1   first form: block-major, K then V, heads before tokens, keys stored rotated (half-split rotary)
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace

from blake3 import blake3

from kvferry.core.dtypes import DTYPES, row_bytes
from kvferry.core.errors import UsageError
from kvferry.kv.pages.layer_groups import LayerGroups
from kvferry.weights.config import ModelConfig

VERSION = 1
_MAX_DIGEST_CHARS = 256
_MAX_COUNT = 1 << 20
_MAX_BLOCK_BYTES = 1 << 32

Description = tuple[int | str, ...]
"""A layout as plain values: VERSION, then the fields in order. The two fields for the range of heads are included only
if the pages have a part of the KV heads; `planes` is appended if it is not 2."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Layout of an engine's pages: model, shape and dtype."""

    model_digest: str
    """Digest of the weights and of the configuration that affects computation, which determine the KV."""
    dtype: str
    """Data type of the KV, one of `core.dtypes.DTYPES`."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    first_kv_head: int = 0
    """Index, among the model's KV heads, of the first KV head in the pages."""
    total_kv_heads: int | None = None
    """Number of KV heads of the model; `None` if the pages have all of them. A number equal to `num_kv_heads` is
    normalized to `None`."""
    planes: int = 2
    """Vectors per token, layer and KV head: key and value, or 1 latent vector."""
    windows: tuple[int, ...] = ()
    """Sliding window of each layer, 0 for full attention, if pages behind a window are released and layers are in
    groups by windows (`layer_groups`); empty if all pages are kept, with all layers in each."""

    def __post_init__(self) -> None:
        """Check the range of KV heads, and normalize `total_kv_heads`.

        Raises:
            ValueError: the range exceeds the model's KV heads, or there are neither one nor two planes.
        """
        if self.planes not in (1, 2):
            raise ValueError(f"planes must be 1 or 2, not {self.planes}")
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"windows has {len(self.windows)} entries for {self.num_layers} layers")
        total = self.num_kv_heads if self.total_kv_heads is None else self.total_kv_heads
        if not 0 <= self.first_kv_head <= total - self.num_kv_heads:
            raise ValueError(
                f"KV heads {self.first_kv_head} to {self.heads.stop - 1} are out of range: total_kv_heads is {total}"
            )
        if total == self.num_kv_heads:
            object.__setattr__(self, "total_kv_heads", None)

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        *,
        block_tokens: int,
        dtype: str,
        model_digest: str = "",
        releases_windows: bool = False,
    ) -> "KvLayout":
        """Build the layout of a model's pages, with all KV heads.

        Args:
            config: the model's shape.
            block_tokens: tokens per block.
            dtype: data type of the KV.
            model_digest: see `KvLayout.model_digest`; empty for pages that are never transferred.
            releases_windows: whether pages behind the windows of layers are released.

        Raises:
            UsageError: `block_tokens` is not positive.
        """
        if block_tokens <= 0:
            raise UsageError(f"block_tokens must be positive, not {block_tokens}", field="block_tokens")
        heads, dim, planes = config.num_kv_heads, config.head_dim, 2
        if config.latent is not None:
            heads, dim, planes = 1, config.latent.width, 1
        windows = tuple(window or 0 for window in config.windows) if releases_windows else ()
        return cls(model_digest, dtype, config.num_layers, heads, dim, block_tokens, planes=planes, windows=windows)

    @property
    def groups(self) -> LayerGroups:
        """Layer groups, each with its own pages."""
        if not self.windows:
            return LayerGroups.single(self.num_layers)
        return LayerGroups.of([window or None for window in self.windows])

    @property
    def dims(self) -> tuple[int, int, int, int, int]:
        """Shape of a page: (layers of a group, planes, kv heads, block tokens, head dim)."""
        return self.groups.page_layers, self.planes, self.num_kv_heads, self.block_tokens, self.head_dim

    @property
    def heads(self) -> range:
        """Range of the KV heads in the pages, numbered as in the model."""
        return range(self.first_kv_head, self.first_kv_head + self.num_kv_heads)

    @property
    def token_bytes(self) -> int:
        """KV bytes per token, all layers: planes x layers x kv heads x (head dim x element bytes + scale bytes)."""
        return self.planes * self.num_layers * self.num_kv_heads * row_bytes(self.dtype, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one page: a block of tokens in the layers of a group."""
        return self.token_bytes // self.num_layers * self.groups.page_layers * self.block_tokens

    @property
    def fingerprint(self) -> bytes:
        """Fingerprint of the layout, 16 bytes. Two fingerprints are equal if and only if pages are interchangeable byte
        for byte."""
        text = (
            f"kvferry-kv-layout v{VERSION} order=block,layer,kv,head,token,dim "
            f"model={self.model_digest} dtype={self.dtype} layers={self.num_layers} "
            f"kv_heads={self.num_kv_heads} head_dim={self.head_dim} block={self.block_tokens}"
        )
        if self.total_kv_heads is not None:
            text += f" first_kv_head={self.first_kv_head} total_kv_heads={self.total_kv_heads}"
        return blake3((text + self._planes_text + self._windows_text).encode()).digest(length=16)

    @property
    def _planes_text(self) -> str:
        return "" if self.planes == _PLANES else f" planes={self.planes}"

    @property
    def _windows_text(self) -> str:
        return f" windows={','.join(map(str, self.windows))}" if self.windows else ""

    @property
    def family(self) -> bytes:
        """Digest of model and heads, 16 bytes. Pages can be converted between two layouts only if their family digests
        are equal."""
        text = (
            f"kvferry-kv-family v{VERSION} model={self.model_digest} layers={self.num_layers} "
            f"kv_heads={self.num_kv_heads} head_dim={self.head_dim} "
            f"first_kv_head={self.first_kv_head} total_kv_heads={self.total_kv_heads}"
            f"{self._planes_text}{self._windows_text}"
        )
        return blake3(text.encode()).digest(length=16)

    @property
    def description(self) -> Description:
        """Layout as plain values, for messages; `described` parses it. Empty if pages are released behind windows: they
        are not converted, so only equal layouts can read them."""
        if self.windows:
            return ()
        *whole, planes, _ = astuple(self)
        shown = whole[:_SHARED] if self.total_kv_heads is None else whole
        return (VERSION, *shown, *([] if planes == _PLANES else [planes]))


_PLANES = 2
_SHARED = len(fields(KvLayout)) - 4
"""Number of fields in the description of a layout with all KV heads and two planes."""


def described(description: Sequence[object]) -> KvLayout:
    """Parse a layout from `KvLayout.description`.

    Raises:
        ValueError: the version differs, the number of fields is wrong, or a field is out of range.
    """
    version, *values = description or (0,)
    if version != VERSION or not _SHARED <= len(values) <= _SHARED + 3:
        raise ValueError(
            f"unsupported layout: version {version!r} with {len(values)} fields; this worker reads version {VERSION}"
        )
    digest, dtype, *counts = values
    planes = counts.pop() if len(values) in {_SHARED + 1, _SHARED + 3} else _PLANES
    if planes not in (1, _PLANES):
        raise ValueError(f"unsupported layout: planes must be 1 or 2, not {planes!r:.20}")
    if not isinstance(digest, str) or len(digest) > _MAX_DIGEST_CHARS:
        raise ValueError(
            f"unsupported layout: the model digest must be a string of at most {_MAX_DIGEST_CHARS} characters, not "
            f"{digest!r:.40}"
        )
    if dtype not in DTYPES:
        raise ValueError(f"unsupported layout: dtype {dtype!r:.40}; use one of {', '.join(DTYPES)}")
    checked = [c for c in counts if isinstance(c, int) and 0 <= c <= _MAX_COUNT]
    if checked != counts or min(checked[: _SHARED - 2]) < 1:
        raise ValueError(
            "unsupported layout: "
            + ", ".join(f"{f.name}={c!r:.20}" for f, c in zip(fields(KvLayout)[2:], counts, strict=False))
            + f"; each must be an integer from 1 to {_MAX_COUNT}, first_kv_head may be 0"
        )
    layers, kv_heads, head_dim, block_tokens, *heads = checked
    made = KvLayout(digest, str(dtype), layers, kv_heads, head_dim, block_tokens, planes=1 if planes == 1 else _PLANES)
    if heads:
        made = replace(made, first_kv_head=heads[0], total_kv_heads=heads[1])
    if made.block_bytes > _MAX_BLOCK_BYTES:
        raise ValueError(
            f"unsupported layout: pages of {made.block_bytes} bytes; at most {_MAX_BLOCK_BYTES} are accepted"
        )
    return made
