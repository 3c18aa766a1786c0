"""One name per block, everywhere: the keyed BLAKE3 chain over a prompt's full blocks.

    root key   = BLAKE3 derive_key("kvferry 2026-11 block names", tenant secret | 0x1f | model and layout fingerprint)
    name[0]    = BLAKE3 keyed(root key, 32 zero bytes  | extra keys | tokens of block 0)
    name[i]    = BLAKE3 keyed(root key, name[i-1]      | extra keys | tokens of block i)

    message:   [ parent name 32 B ][ extra length u16 LE ][ extra ... ][ token u32 LE ] x block_tokens

The key isolates tenants and models: equal text under another tenant has another name, and nobody
without the key can compute or confirm a name. `extra` separates what shares tokens but not KV (an
adapter, a salt). Only full blocks have names. The format is fixed by golden vectors
(tests/golden/block_names.json); changing it means changing the context string.
"""

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence

from blake3 import blake3

from kvferry.core.ids import BlockHash

_CONTEXT = "kvferry 2026-11 block names"
_NO_PARENT = bytes(32)
_MAX_EXTRA_BYTES = 0xFFFF


class BlockNamer:
    """Names blocks for one tenant, one model and layout, one set of extra keys.

    Immutable; safe to share between threads.
    """

    __slots__ = ("_extra", "_key", "block_tokens")

    def __init__(self, *, tenant: bytes, fingerprint: bytes, block_tokens: int, extra: bytes = b"") -> None:
        """
        Args:
            tenant: the tenant's secret; any length, never logged.
            fingerprint: digest of model and KV layout (`kv.layout`), so that unlike bytes never share a name.
            block_tokens: tokens per block.
            extra: what else the KV depends on, for example an adapter's name; at most 65,535 bytes.

        Raises:
            ValueError: `block_tokens` is not positive, or `extra` is too long.
        """
        if block_tokens <= 0:
            raise ValueError(f"block_tokens must be positive, not {block_tokens}")
        if len(extra) > _MAX_EXTRA_BYTES:
            raise ValueError(f"extra keys take {len(extra)} bytes; at most {_MAX_EXTRA_BYTES} fit")
        self.block_tokens = block_tokens
        self._key = blake3(tenant + b"\x1f" + fingerprint, derive_key_context=_CONTEXT).digest()
        self._extra = struct.pack("<H", len(extra)) + extra

    def name(self, parent: BlockHash | None, tokens: Sequence[int]) -> BlockHash:
        """The name of one full block after `parent` (`None`: the prompt's first block).

        Raises:
            ValueError: `tokens` is not exactly one block.
            OverflowError: a token id does not fit 32 bits unsigned.
        """
        if len(tokens) != self.block_tokens:
            raise ValueError(f"a block has {self.block_tokens} tokens, not {len(tokens)}")
        message = (parent or _NO_PARENT) + self._extra + _pack_u32(tokens)
        return BlockHash(blake3(message, key=self._key).digest())

    def chain(self, tokens: Sequence[int]) -> list[BlockHash]:
        """Names of all full blocks of `tokens`, in order; a partial last block has none."""
        names: list[BlockHash] = []
        parent: BlockHash | None = None
        for start in range(0, len(tokens) - self.block_tokens + 1, self.block_tokens):
            parent = self.name(parent, tokens[start : start + self.block_tokens])
            names.append(parent)
        return names


def _pack_u32(tokens: Iterable[int]) -> bytes:
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
