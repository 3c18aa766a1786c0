"""What goes into an engine and what comes out of it, step by step."""

from dataclasses import dataclass

from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine.jobs import Progress
from kvferry.engine.prefix_index import CacheChange
from kvferry.engine.scheduler import SequenceUpdate
from kvferry.engine.sequence import RemoteKv
from kvferry.kv.connector import LoadOutcome
from kvferry.kv.price import Decision


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to continue."""

    request_id: RequestId
    token_ids: list[int]
    """Prompt, then what was generated before (a stream that moved here)."""
    sampling: SamplingParams
    num_generated: int = 0
    sample_index: int = 0
    tenant: str = ""
    exports: bool = False
    """Draw one token, then leave the pages to an offer."""
    keeps: bool = False
    """Say at the end where the full blocks are; nothing holds them."""
    remote: RemoteKv | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Every countable thing that a request holds in the engine."""

    running: int
    waiting: int
    loading: int
    blocks_total: int
    blocks_free: int
    blocks_quarantined: int
    exports: int
    exported_blocks: int
    """Those that exports hold, shared ones counted for each."""
    transfers: int
    """Reads from peers and tiers in flight, those made ahead included."""
    stores: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step brought."""

    updates: list[SequenceUpdate]
    exports: dict[RequestId, int]
    """Numbers of the exports that this step made; whoever reads this now owns them (`release_export`)."""
    loads: list[LoadOutcome]
    decisions: list[tuple[RequestId, Decision]]
    """What was chosen between loading and computing since the last step."""
    progress: list[Progress]
    """Full blocks of prompts that are still being computed and will be handed over."""
    cache_changes: list[CacheChange]
    """Named blocks that came into the prefix cache or left it, in order."""
    ran: bool
    """Whether anything was computed; if not, only a new message or a freed page can change that."""
