"""KV of one sequence: its pages, how far they are computed, listed, stored and reported, and KV that can be loaded."""

from dataclasses import dataclass, field

from kvferry.core.hashing import BlockNamer
from kvferry.core.ids import BlockHash
from kvferry.engine.schedule.blocks.block_table import BlockTable
from kvferry.engine.schedule.blocks.cached_prefix import CachedPrefix
from kvferry.engine.schedule.step.kv_account import KvAccount


@dataclass(frozen=True, slots=True)
class RemoteKv:
    """KV of a prefix of a sequence at a peer or in a tier. The scheduler reads only its token range."""

    num_tokens: int
    """Positions first_token .. num_tokens-1 can be loaded."""
    source: object
    """Input of the loader: an opened ticket, or keys of storage objects."""
    label: str = "peer"
    """Kind of the source, for reports and cost estimates."""
    place: str = ""
    """Instance of the source, such as a peer's worker id; costs are estimated separately for each instance."""
    first_token: int = 0
    """First position that can be loaded; earlier positions were in the prefix cache at the time of the lookup."""
    has_all_pages: bool = False
    """Whether the source has the pages of all layer groups for every block, as tiers do, instead of only the pages that
    later rows read."""


@dataclass(slots=True, eq=False)
class KvProgress:
    """KV of one sequence. Changed by the modules that move KV, through the methods of this class; the allocator changes
    the block table."""

    remote: RemoteKv | None = None
    """KV that can be loaded; `None` if there is none, or after the load."""
    names: list[BlockHash] = field(default_factory=list)
    """Names of the full blocks hashed so far; a prefix of the hash chain."""
    account: KvAccount = field(default_factory=KvAccount)
    """Sources of the prompt's tokens."""
    table: BlockTable = field(default_factory=BlockTable)
    num_computed: int = 0
    """C: number of leading tokens whose KV is in the pages."""
    num_listed: int = 0
    """Number of leading blocks that are in the prefix index."""
    num_stored: int = 0
    """Number of leading blocks that were stored in the tiers or loaded from them."""
    num_reported: int = 0
    """Number of leading blocks that were reported as `NewBlocks`."""
    num_written: int = 0
    """Number of prompt tokens that were computed and whose blocks are in the prefix index."""
    is_lookup_pending: bool = False
    """Whether a tier lookup is pending; admission skips the sequence until it completes."""
    last_lookup: tuple[int, int, CachedPrefix] | None = None
    """Last lookup in the prefix cache: version of the cache, maximum number of tokens, and result; `None` if
    there is none."""

    def name_blocks(self, namer: BlockNamer, tokens: list[int]) -> list[BlockHash]:
        """Return the names of all full blocks of `tokens`; only new blocks are hashed.

        Args:
            namer: names the sequence's blocks.
            tokens: the sequence's tokens.
        """
        size = namer.block_tokens
        while (len(self.names) + 1) * size <= len(tokens):
            start = len(self.names) * size
            parent = self.names[-1] if self.names else None
            self.names.append(namer.name(parent, tokens[start : start + size]))
        return self.names

    # ------------------------------------------------------------------ lookups and loads

    def remember_lookup(self, version: int, max_tokens: int, found: CachedPrefix) -> None:
        """Keep the result of a lookup in the prefix cache.

        Args:
            version: version of the cache.
            max_tokens: maximum number of tokens of the lookup.
            found: the longest cached prefix.
        """
        self.last_lookup = (version, max_tokens, found)

    def begin_lookup(self) -> None:
        """Record that a tier lookup has begun, which admission waits for."""
        self.is_lookup_pending = True

    def end_lookup(self, remote: RemoteKv | None) -> None:
        """Record the result of a tier lookup."""
        self.is_lookup_pending = False
        self.remote = remote

    def drop_remote(self, *, unloaded_from: int | None = None) -> None:
        """Compute the KV, instead of loading it.

        Args:
            unloaded_from: first position that should have been loaded, if the load failed or cannot start; `None` if
                computing was chosen.
        """
        if self.remote is not None and unloaded_from is not None:
            self.account.load_failed(range(unloaded_from, self.remote.num_tokens))
        self.remote = None

    def loaded_to(self, num_tokens: int, *, num_stored: int = 0) -> None:
        """Record that KV was loaded and verified.

        Args:
            num_tokens: number of leading tokens whose KV is now in the pages.
            num_stored: number of leading blocks that the tiers have.
        """
        self.num_computed = max(self.num_computed, num_tokens)
        self.num_stored = max(self.num_stored, num_stored)
        self.remote = None

    # ------------------------------------------------------------------ pages

    def start_from(self, num_blocks: int, block_tokens: int) -> None:
        """Record the cached prefix that the sequence starts from.

        Args:
            num_blocks: number of blocks of the prefix.
            block_tokens: tokens per block.
        """
        self.last_lookup = None
        self.num_computed = num_blocks * block_tokens
        self.num_listed = num_blocks
        self.num_stored = max(self.num_stored, num_blocks)

    def advance(self, num_tokens: int) -> None:
        """Record that a step has computed the KV of the next `num_tokens` tokens."""
        self.num_computed += num_tokens

    def advance_to(self, num_tokens: int) -> None:
        """Record that the KV of `num_tokens` leading tokens is computed."""
        self.num_computed = num_tokens

    def lost_pages(self) -> None:
        """Record that the pages were freed, so that their KV must be computed or loaded again."""
        self.num_computed = self.num_listed = self.num_reported = 0

    def forget_names(self) -> None:
        """Forget the names of the blocks and what the caches have under them, because the model's weights changed; the
        sequence holds no pages."""
        self.names, self.last_lookup, self.remote = [], None, None
        self.is_lookup_pending = False
        self.num_stored = 0

    # ------------------------------------------------------------------ full blocks

    def listed_to(self, num_blocks: int) -> None:
        """Record that `num_blocks` leading blocks are in the prefix index."""
        self.num_listed = num_blocks

    def written_to(self, num_tokens: int) -> None:
        """Record that the blocks of `num_tokens` leading tokens of the prompt are in the prefix index."""
        self.num_written = max(self.num_written, num_tokens - self.account.num_cached - self.account.num_loaded)

    def stored_to(self, num_blocks: int) -> None:
        """Record that the stores of `num_blocks` leading blocks are planned."""
        self.num_stored = num_blocks

    def reported_to(self, num_blocks: int) -> None:
        """Record that `num_blocks` leading blocks were reported."""
        self.num_reported = num_blocks
