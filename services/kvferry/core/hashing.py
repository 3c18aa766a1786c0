"""Block hashes, also called block names: the keyed BLAKE3 chain over a prompt's full blocks.

    secret     = tenant key | 0x00 | tenant
    root key   = BLAKE3 derive_key("kvferry 2026-11 block names", secret | 0x1f | model and layout fingerprint)
    name[0]    = BLAKE3 keyed(root key, 32 zero bytes  | extra keys | tokens of block 0)
    name[i]    = BLAKE3 keyed(root key, name[i-1]      | extra keys | tokens of block i)

    message:   [ parent name 32 B ][ extra length u16 LE ][ extra ... ][ token u32 LE ] x block_tokens

The key isolates tenants and models: the same text has different names for two tenants, and names can be neither
computed nor verified without the key. Workers and gateways share the tenant key (docs/adr/0021-one-name-per-block.md),
so that a gateway computes the same names as a worker's cache events. `extra` distinguishes content with equal tokens
but different KV; a salt and an adapter are part of the tenant (`cache_scope`). Only full blocks have names. Golden
vectors (tests/golden/block_names.json) fix the format; changing it requires a new context string.
"""

import struct
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from blake3 import blake3

from kvferry.core.ids import AdapterId, BlockHash

_CONTEXT = "kvferry 2026-11 block names"
_NO_PARENT = bytes(32)
_MAX_EXTRA_BYTES = 0xFFFF
_MAX_NAMERS = 1024
_CHECK_TENANT = "\x1fcheck"
SALT_DIGEST_CHARS = 33
"""Number of characters that a salt adds to a tenant: a separator and a digest."""
ADAPTER_DIGEST_CHARS = 33
"""Number of characters that an adapter adds to a tenant: a separator and a digest."""
_ADAPTER_MARK = "\x1e"
_SALT_MARK = "\x1f"


class BlockNamer:
    """Computes block names for one tenant, model, layout and set of extra keys.

    Immutable and thread-safe.
    """

    __slots__ = ("_extra", "_key", "block_tokens")

    def __init__(self, *, tenant: bytes, fingerprint: bytes, block_tokens: int, extra: bytes = b"") -> None:
        """
        Args:
            tenant: the tenant's secret, of any length; never logged.
            fingerprint: digest of model and KV layout (`kv.pages.layout`): pages of different layouts never share a
                name.
            block_tokens: tokens per block.
            extra: other inputs that the KV depends on, for example an adapter's name; at most 65,535 bytes.

        Raises:
            ValueError: `block_tokens` is not positive, or `extra` is too long.
        """
        if block_tokens <= 0:
            raise ValueError(f"block_tokens must be positive, not {block_tokens}")
        if len(extra) > _MAX_EXTRA_BYTES:
            raise ValueError(f"extra keys have {len(extra)} bytes; the limit is {_MAX_EXTRA_BYTES}")
        self.block_tokens = block_tokens
        self._key = blake3(tenant + b"\x1f" + fingerprint, derive_key_context=_CONTEXT).digest()
        self._extra = struct.pack("<H", len(extra)) + extra

    def name(self, parent: BlockHash | None, tokens: Sequence[int]) -> BlockHash:
        """Return the name of a full block.

        Args:
            parent: name of the previous block; `None` for a prompt's first block.
            tokens: the token ids of the block, exactly `block_tokens`.

        Raises:
            ValueError: `tokens` is not exactly one block.
            OverflowError: a token id does not fit an unsigned 32-bit integer.
        """
        if len(tokens) != self.block_tokens:
            raise ValueError(f"a block has {self.block_tokens} tokens, not {len(tokens)}")
        return self.chain(tokens, parent)[0]

    def chain(self, tokens: Sequence[int], parent: BlockHash | None = None) -> list[BlockHash]:
        """Return the names of all full blocks of `tokens`, in order; a partial last block has no name.

        Args:
            tokens: tokens that follow the block `parent`.
            parent: name of the block before them; `None` if they begin a prompt.

        Raises:
            OverflowError: a token id does not fit an unsigned 32-bit integer.
        """
        names: list[BlockHash] = []
        packed, size, key, extra = _pack_u32(tokens), 4 * self.block_tokens, self._key, self._extra
        before: bytes = parent or _NO_PARENT
        for start in range(0, len(packed) - size + 1, size):
            before = blake3(before + extra + packed[start : start + size], key=key).digest()
            names.append(BlockHash(before))
        return names


class BlockNamers:
    """Cache of the 1,024 most recently used `BlockNamer` objects of all tenants under one tenant key.

    Not thread-safe.
    """

    __slots__ = ("_namers", "_tenant_key")

    def __init__(self, tenant_key: bytes) -> None:
        """
        Args:
            tenant_key: secret key for all block names in a pool; never logged.
        """
        self._tenant_key = tenant_key
        self._namers: OrderedDict[tuple[str, bytes, int], BlockNamer] = OrderedDict()

    def of(self, tenant: str, *, fingerprint: bytes, block_tokens: int) -> BlockNamer:
        """Return the `BlockNamer` for a tenant and a KV layout.

        Args:
            tenant: the tenant, or a scope of it (`cache_scope`).
            fingerprint: digest of model and KV layout.
            block_tokens: tokens per block.

        Raises:
            ValueError: `block_tokens` is not positive.
        """
        key = (tenant, fingerprint, block_tokens)
        namer = self._namers.get(key)
        if namer is None:
            secret = self._tenant_key + b"\x00" + tenant.encode()
            namer = BlockNamer(tenant=secret, fingerprint=fingerprint, block_tokens=block_tokens)
            self._namers[key] = namer
            if len(self._namers) > _MAX_NAMERS:
                self._namers.popitem(last=False)
        else:
            self._namers.move_to_end(key)
        return namer


def check_name(namers: BlockNamers, *, fingerprint: bytes, block_tokens: int) -> BlockHash:
    """Return the name of one fixed block, which no request uses. Processes with different tenant keys get different
    names, and can compare them without exchanging the keys.

    Args:
        namers: the process's namers, with its tenant key.
        fingerprint: digest of model and KV layout.
        block_tokens: tokens per block.

    Raises:
        ValueError: `block_tokens` is not positive.
    """
    namer = namers.of(_CHECK_TENANT, fingerprint=fingerprint, block_tokens=block_tokens)
    return namer.name(None, range(block_tokens))


def _pack_u32(tokens: Iterable[int]) -> bytes:
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def cache_scope(tenant: str, salt: str, adapter: AdapterId | None = None) -> str:
    """Return the scope of a request's block names: the tenant, followed by a digest of the salt, if any, and a digest
    of the adapter's content and name, if any.

    Requests with unequal salts share no KV, so that the time to first token of one does not reveal whether a prompt was
    computed for another. KV that was computed with an adapter is used only with the same version of the adapter.
    Workers treat the scope as a tenant.

    Args:
        tenant: name of the tenant.
        salt: the request's cache salt; empty for none.
        adapter: version of the adapter with which the KV is computed; `None` for the base model.
    """
    salted = f"{tenant}{_SALT_MARK}{blake3(salt.encode('utf-8', 'surrogatepass')).hexdigest(16)}" if salt else tenant
    return salted + _adapter_part(adapter)


def tenant_of_scope(scope: str) -> str:
    """Return the tenant of a scope; empty for the default tenant.

    Args:
        scope: a result of `cache_scope`.
    """
    return scope.partition(_ADAPTER_MARK)[0].partition(_SALT_MARK)[0]


def is_scope_of(scope: str, adapter: AdapterId | None) -> bool:
    """Return whether a scope belongs to this version of the adapter, or to no adapter.

    Args:
        scope: a result of `cache_scope`.
        adapter: version of an adapter; `None` for the base model.
    """
    _, mark, rest = scope.partition(_ADAPTER_MARK)
    return mark + rest == _adapter_part(adapter)


def _adapter_part(adapter: AdapterId | None) -> str:
    if adapter is None:
        return ""
    name = adapter.name.encode("utf-8", "surrogatepass")
    return _ADAPTER_MARK + blake3(adapter.digest + name).hexdigest(16)
