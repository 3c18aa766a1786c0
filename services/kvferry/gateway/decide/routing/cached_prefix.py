"""The hashes of a prompt's blocks, and its cached prefix on each replica as predicted by the cache map.

Hashes depend on the worker's KV layout, so each layout has its own hash chain. Requests are routed by the hash of a
leading block; prior turns are looked up by the hashes of all blocks; workers' cache events use the same hashes.
"""

from collections.abc import Sequence

from blake3 import blake3

from kvferry.core.hashing import BlockNamers
from kvferry.core.ids import BlockHash
from kvferry.gateway.decide.cache_map.cache_map import CacheMap, Lookup
from kvferry.gateway.decide.cache_map.seen_blocks import SeenBlocks
from kvferry.gateway.decide.routing.routes import Pick, PredictedPrefix, PrefixKey, Replica

MAX_BLOCKS = 4096
"""Maximum number of a prompt's blocks that are looked up; hashing them takes about 5 ms."""


def block_names(namers: BlockNamers, tenant: str, replica: Replica, token_ids: Sequence[int]) -> list[BlockHash]:
    """Return the hashes of all full blocks of `token_ids` in the layout of `replica`, in order.

    Args:
        namers: factory of block namers, keyed like the workers'.
        tenant: cache scope of the request.
        replica: supplies the layout fingerprint and the block size in tokens.
        token_ids: token ids of the prompt.
    """
    namer = namers.of(tenant, fingerprint=replica.layout_fingerprint, block_tokens=replica.block_tokens)
    return namer.chain(token_ids)


class PromptNames:
    """Hashes of one prompt's blocks in each layout, computed once. More tokens may be appended to the prompt."""

    def __init__(self) -> None:
        self._names: dict[tuple[bytes, int], list[BlockHash]] = {}

    def of(
        self, namers: BlockNamers, tenant: str, replica: Replica, token_ids: Sequence[int], max_blocks: int
    ) -> list[BlockHash]:
        """Return the hashes of the first full blocks of `token_ids` in the layout of `replica`, at most `max_blocks`.

        Args:
            namers: factory of block namers, keyed like the workers'.
            tenant: cache scope of the request.
            replica: supplies the layout fingerprint and the block size in tokens.
            token_ids: the prompt; begins with the tokens of earlier calls, or is a prefix of them.
            max_blocks: maximum number of hashes.
        """
        size = replica.block_tokens
        names = self._names.setdefault((replica.layout_fingerprint, size), [])
        num_blocks = min(len(token_ids) // size, max_blocks)
        if len(names) < num_blocks:
            namer = namers.of(tenant, fingerprint=replica.layout_fingerprint, block_tokens=size)
            names += namer.chain(token_ids[len(names) * size : num_blocks * size], names[-1] if names else None)
        return names[:num_blocks]


def routing_key(
    namers: BlockNamers, tenant: str, token_ids: Sequence[int], prefix_blocks: int, affinity_key: str = ""
) -> PrefixKey:
    """Return the key by which a request is routed to a replica: the client's affinity key, or else the beginning of the
    prompt (`prefix_key`).

    Args:
        namers: factory of block namers, keyed like the workers'.
        tenant: cache scope of the request; keys of different scopes are unrelated.
        token_ids: the prompt; at least one token.
        prefix_blocks: number of leading full blocks in the key.
        affinity_key: the client's key; empty if there is none.
    """
    if not affinity_key:
        return prefix_key(namers, tenant, token_ids, prefix_blocks)
    key = blake3(b"\x00".join((tenant.encode(), affinity_key.encode("utf-8", "surrogatepass")))).digest()
    return lambda _: key


def prefix_key(namers: BlockNamers, tenant: str, token_ids: Sequence[int], prefix_blocks: int) -> PrefixKey:
    """Return the key by which a request is routed to a replica.

    Args:
        namers: factory of block namers, keyed like the workers'.
        tenant: cache scope of the request.
        token_ids: the prompt; at least one token.
        prefix_blocks: number of leading full blocks in the key.

    Returns:
        A function from a replica to a hash in the replica's layout: of block number `prefix_blocks`; if the prompt has
        fewer blocks, of its last full block; if it has no full block, of all tokens as one block.
    """
    known: dict[tuple[bytes, int], bytes] = {}

    def key(replica: Replica) -> bytes:
        layout = (replica.layout_fingerprint, replica.block_tokens)
        found = known.get(layout)
        if found is None:
            block_tokens = min(replica.block_tokens, len(token_ids))
            namer = namers.of(tenant, fingerprint=replica.layout_fingerprint, block_tokens=block_tokens)
            found = known[layout] = namer.chain(token_ids[: prefix_blocks * block_tokens])[-1]
        return found

    return key


class PromptCaches:
    """Predictions for one prompt, with one lookup for each KV layout. Calling it with a replica returns the replica's
    cached prefix."""

    def __init__(
        self,
        cache_map: CacheMap,
        namers: BlockNamers,
        names: PromptNames,
        tenant: str,
        token_ids: Sequence[int],
        min_blocks: int,
    ) -> None:
        """
        Args:
            cache_map: predicts the blocks that each replica has.
            namers: factory of block namers, keyed like the workers'.
            names: hashes of the prompt's blocks that were computed earlier.
            tenant: cache scope of the request.
            token_ids: the prompt.
            min_blocks: number of blocks that must be cached for the cached prefix to decide the choice of a replica;
                if a prompt has fewer blocks, all of them must be cached.
        """
        self._map = cache_map
        self._namers = namers
        self._names = names
        self._tenant = tenant
        # A worker computes at least the last token of a prompt, so a cached block that ends there is not used.
        self._token_ids = token_ids[:-1]
        self._min_blocks = min_blocks
        self._lookups: dict[tuple[bytes, int], tuple[Lookup, int]] = {}
        self._found: dict[str, PredictedPrefix] = {}
        """Predictions by address, as of the decision: the later comparison with other policies must not count the
        blocks that the prompt itself will add."""

    def __call__(self, replica: Replica) -> PredictedPrefix:
        found = self._found.get(replica.address)
        if found is None:
            found = self._found[replica.address] = self._predict(replica)
        return found

    def _predict(self, replica: Replica) -> PredictedPrefix:
        lookup, num_blocks = self._lookup(replica)
        found = lookup.of(replica.address)
        return PredictedPrefix(
            tokens=found.num_blocks * replica.block_tokens,
            confirmed_tokens=found.num_confirmed * replica.block_tokens,
            decides=found.num_blocks >= min(self._min_blocks, num_blocks) > 0,
            state=found.state,
            basis=found.basis,
        )

    def chose(self, pick: Pick) -> None:
        """Note that the prompt is sent to a replica, which will have all of its blocks."""
        self._lookup(pick.replica)[0].chose(pick.replica.address)

    def elsewhere(self, pick: Pick) -> int:
        """Return the largest number of the prompt's leading tokens that a replica with an exact map and the layout of
        the chosen one has, other than the chosen one."""
        lookup, _ = self._lookup(pick.replica)
        return lookup.elsewhere(pick.replica.address) * pick.replica.block_tokens

    def note_seen(self, pick: Pick, seen: SeenBlocks) -> tuple[int, int]:
        """Add the prompt's blocks to those of earlier prompts, in the layout of the replica that computes it; return
        the number of its tokens in blocks that were known, and in all blocks that a cache can give.

        Args:
            pick: the replica.
            seen: the blocks of earlier prompts.
        """
        size = pick.replica.block_tokens
        names = self._names.of(self._namers, self._tenant, pick.replica, self._token_ids, MAX_BLOCKS)
        return size * seen.note(names), size * len(names)

    def _lookup(self, replica: Replica) -> tuple[Lookup, int]:
        layout = (replica.layout_fingerprint, replica.block_tokens)
        found = self._lookups.get(layout)
        if found is None:
            names = self._names.of(self._namers, self._tenant, replica, self._token_ids, MAX_BLOCKS)
            found = self._lookups[layout] = (self._map.look_up(names), len(names))
        return found
