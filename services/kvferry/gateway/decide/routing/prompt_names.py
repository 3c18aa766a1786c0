"""Hashes of a prompt's blocks, as the workers' engines compute them.

Hashes depend on the worker's KV layout, so each layout has its own hash chain. Requests are routed by the hash of a
leading block; prior turns are looked up by the hashes of all blocks; workers' cache events use the same hashes.
"""

from collections.abc import Sequence

from kvferry.core.hashing import BlockNamers
from kvferry.core.ids import BlockHash
from kvferry.gateway.decide.routing.replicas import PrefixKey, Replica


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
