"""Messages of the engine: commands to it, and the output of each step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.core.errors import InvariantBroken, KvferryError
from kvferry.core.ids import AdapterId, BlockHash, RequestId
from kvferry.core.inference.pooling import PoolingParams
from kvferry.core.pausing import PauseMode
from kvferry.core.retention import Retention
from kvferry.core.sampling import NO_SAMPLING, SamplingParams
from kvferry.engine.schedule.adapters.adapter_store import LoadedAdapter
from kvferry.engine.schedule.blocks.prefix_index import CacheChange
from kvferry.engine.schedule.loads.kv_prefetch import KvPrefetchRequest
from kvferry.engine.schedule.step.kv_jobs import NewBlocks, SequenceUpdate
from kvferry.engine.schedule.step.kv_progress import RemoteKv
from kvferry.kv.interface.connector import LoadOutcome
from kvferry.kv.interface.tiering import KvMessage
from kvferry.kv.pricing.price import LoadDecision


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """Command: run one sequence."""

    request_id: RequestId
    token_ids: list[int]
    """Prompt, followed by the tokens generated earlier if the request is resumed."""
    sampling: SamplingParams
    num_generated: int = 0
    sample_index: int = 0
    priority: int = 0
    """Priority of the request, used if the scheduling policy compares priorities; lower numbers come first."""
    deadline: float | None = None
    """Monotonic seconds by which the first token is needed; `None` for no deadline."""
    scope: str = ""
    """Scope of the request's KV (`core.hashing.cache_scope`)."""
    adapter: AdapterId | None = None
    """Version of the adapter to use, to which the scope must then belong; `None` for the base model."""
    exports: bool = False
    """Whether to sample one token and then export the pages to an offer."""
    keeps: bool = False
    """Whether to report the pages of the full blocks when the sequence ends, without holding references to them."""
    retain_seconds: float = 0.0
    """Time to live of the prompt's blocks in the cache, from its first token; 0 for no retention."""
    remote: RemoteKv | None = None
    pooling: PoolingParams | None = None
    """Set for a pooling request: it returns a vector of its prompt and samples no tokens."""

    @classmethod
    def for_vector(
        cls,
        request_id: RequestId,
        token_ids: Sequence[int],
        params: PoolingParams,
        *,
        scope: str = "",
        priority: int = 0,
        deadline: float | None = None,
    ) -> "EngineRequest":
        """Create a pooling request; it samples no tokens, so its sampling parameters have no effect.

        Args:
            request_id: id of the request.
            token_ids: token ids of the prompt.
            params: parameters of the vector.
            scope: cache scope of the prompt.
            priority: priority of the request; lower numbers come first.
            deadline: monotonic time in seconds at which the request is aborted; `None` for no deadline.
        """
        return cls(
            request_id, list(token_ids), NO_SAMPLING, priority=priority, deadline=deadline, scope=scope, pooling=params
        )


@dataclass(frozen=True, slots=True)
class Abort:
    """Command: abort a request or a KV prefetch."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class ReleaseExport:
    """Command: free the pages of an export."""

    number: int


@dataclass(frozen=True, slots=True)
class MaskReady:
    """Command without an action: wakes the engine's thread, since a sequence that waited for its mask can run."""


@dataclass(frozen=True, slots=True)
class ModelFailed:
    """Command: stop with an error, since no further step can be computed."""

    error: InvariantBroken


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """Command: take an adapter that was loaded again for sequences that wait for it."""

    adapter: AdapterId
    outcome: LoadedAdapter | KvferryError


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Command: empty the prefix cache."""

    reply: Callable[[int], None]
    """Called on the engine's thread with the number of dropped blocks."""


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A pinned prefix, as reported to the caller of `PinPrefix`."""

    name: BlockHash
    """Name of its last block, which identifies its tokens and its scope."""
    num_tokens: int
    """Number of tokens in its full blocks."""
    num_blocks: int
    """Number of its full blocks."""
    seconds_left: float
    """Seconds until the pin ends."""


PinReply = Callable[[PinnedPrefix | KvferryError], None]
"""Called on the engine's thread with the result of `PinPrefix`."""


@dataclass(frozen=True, slots=True)
class PinPrefix:
    """Command: compute a prefix and pin its full blocks; see `pins.pinning`."""

    request: EngineRequest
    ttl_seconds: float
    reply: PinReply


@dataclass(frozen=True, slots=True)
class UnpinPrefix:
    """Command: end the pin of a prefix; see `Pinning.unpin`."""

    scope: str
    token_ids: list[int]
    reply: Callable[[PinnedPrefix | None], None]
    """Called on the engine's thread with the pin as it was; `None` if there was none."""


@dataclass(frozen=True, slots=True)
class ClosePins:
    """Command: end all pins and refuse new ones."""

    reply: Callable[[None], None]
    """Called on the engine's thread."""


@dataclass(frozen=True, slots=True)
class PauseGeneration:
    """Command: pause generation, change the mode of the pause, or resume."""

    mode: PauseMode | None
    """`None` to resume."""
    reply: Callable[[None], None]
    """Called on the engine's thread."""


@dataclass(frozen=True, slots=True)
class NewWeights:
    """Weights that are ready to be used."""

    name: str
    """Their version."""
    fingerprint: bytes
    """Fingerprint of the layout of the KV that they compute."""
    install: Callable[[], None]
    """Makes the runner and all that depends on the layout use them; called on the engine's thread, between two
    steps."""


@dataclass(frozen=True, slots=True)
class ChangeWeights:
    """Command: compute with other weights; see `Engine.change_weights`."""

    weights: NewWeights
    reply: Callable[[int | KvferryError], None]
    """Called on the engine's thread with the number of sequences that continue."""


@dataclass(frozen=True, slots=True)
class ChangeAdapter:
    """Command: register an adapter, replace the one with the same name, or remove it."""

    name: str
    loaded: LoadedAdapter | None
    """The adapter; `None` to remove the adapter with this name."""
    reply: Callable[[AdapterId | KvferryError], None]
    """Called on the engine's thread."""


Command = (
    EngineRequest
    | KvPrefetchRequest
    | Abort
    | ReleaseExport
    | MaskReady
    | ModelFailed
    | AdapterLoaded
    | ResetPrefixCache
    | PinPrefix
    | UnpinPrefix
    | ClosePins
    | ChangeAdapter
    | PauseGeneration
    | ChangeWeights
    | KvMessage
)
"""Any command to an engine."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Output of one step."""

    updates: list[SequenceUpdate]
    exports: dict[RequestId, int]
    """Numbers of the exports made in this step, by request. The receiver owns the exports and must release them
    (`release_export`)."""
    loads: list[LoadOutcome]
    decisions: list[tuple[RequestId, LoadDecision]]
    """Load-or-recompute decisions since the previous step."""
    progress: list[NewBlocks]
    """Newly full blocks of prompts whose prefill is running and whose KV will be handed off."""
    cache_changes: list[CacheChange]
    """Named blocks added to the prefix cache or removed from it, in order."""
    retained: dict[RequestId, Retention]
    """Results of the retentions that requests asked for, with their first token."""
    ran: bool
    """Whether a step was computed; if not, no sequence can run until a message arrives or a page is freed."""
