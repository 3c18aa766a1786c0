"""The cached prefix of one prompt on each replica, as predicted by the cache map."""

from collections.abc import Sequence

from kvferry.core.hashing import BlockNamers
from kvferry.gateway.decide.cache_map.cache_map import CacheMap, Lookup
from kvferry.gateway.decide.routing.prompt_names import PromptNames
from kvferry.gateway.decide.routing.replicas import CachedPrefix, Replica
from kvferry.gateway.decide.routing.routes import Pick

MAX_BLOCKS = 4096
"""Maximum number of a prompt's blocks that are looked up; hashing them takes about 5 ms."""


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
        self._found: dict[str, CachedPrefix] = {}
        """Predictions by address, as of the decision: the later comparison with other policies must not count the
        blocks that the prompt itself will add."""

    def __call__(self, replica: Replica) -> CachedPrefix:
        found = self._found.get(replica.address)
        if found is None:
            found = self._found[replica.address] = self._predict(replica)
        return found

    def _predict(self, replica: Replica) -> CachedPrefix:
        lookup, num_blocks = self._lookup(replica)
        found = lookup.of(replica.address)
        return CachedPrefix(
            tokens=found.num_blocks * replica.block_tokens,
            confirmed_tokens=found.num_confirmed * replica.block_tokens,
            decides=found.num_blocks >= min(self._min_blocks, num_blocks) > 0,
            state=found.state,
            basis=found.basis,
        )

    def chose(self, pick: Pick) -> None:
        """Note that the prompt is sent to a replica, which will have all of its blocks."""
        self._lookup(pick.replica)[0].chose(pick.replica.address)

    def _lookup(self, replica: Replica) -> tuple[Lookup, int]:
        layout = (replica.layout_fingerprint, replica.block_tokens)
        found = self._lookups.get(layout)
        if found is None:
            names = self._names.of(self._namers, self._tenant, replica, self._token_ids, MAX_BLOCKS)
            found = self._lookups[layout] = (self._map.look_up(names), len(names))
        return found
