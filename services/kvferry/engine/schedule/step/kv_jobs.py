"""Scheduler outputs other than steps: KV loads, stores and exports, prefill progress, and sequence updates."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.core.causes import ComputedTokens
from kvferry.core.errors import KvferryError
from kvferry.core.ids import BlockHash, BlockId, RequestId
from kvferry.core.sampling import FinishReason, SampledToken, ScoredToken
from kvferry.engine.schedule.step.kv_progress import RemoteKv
from kvferry.kv.interface.tiering import ObjectKey


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Load of KV from a peer or a tier into pages that are already held. Blocks are numbered by their position in the
    prompt:

    prompt      [ b0 | b1 | b2 | b3 ]     covered by the source
    local hit   [ b0 | b1 ]
    fetched               [ b2 | b3 ]     first_block = 2; targets are this sequence's pages 2 and 3
    """

    request_id: RequestId
    remote: RemoteKv
    """Source of the KV. After the load, all positions below its `num_tokens` are treated as computed."""
    first_block: int
    targets: tuple[BlockId, ...]
    """Pages of the blocks in order. With layer groups: the pages of all groups, block by block, if the source has them
    (`RemoteKv.has_all_pages`), otherwise in the order of `layer_groups.handed_over`."""
    is_return: bool = False
    """Whether the sequence resumes after a preemption."""


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Store of one storage object, whose blocks are full and computed. Only the block table holds the pages, so the
    receiver must take references to them."""

    key: ObjectKey
    blocks: tuple[BlockId, ...]
    """Pages of the blocks in order; with layer groups, the pages of all groups, block by block."""


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Newly full blocks of a prompt whose prefill is running; they follow the blocks of the previous report."""

    request_id: RequestId
    blocks: tuple[BlockId, ...]
    epochs: tuple[int, ...]
    names: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Export:
    """Pages of a finished prefill, whose references pass to an offer."""

    blocks: tuple[BlockId, ...]
    epochs: tuple[int, ...]
    num_tokens: int


class SequenceUpdate(NamedTuple):
    """Result of one step for one sequence. It is a tuple for speed, since one is created per sequence and step."""

    request_id: RequestId
    tokens: tuple[SampledToken, ...]
    """Sampled tokens in order of position; empty only if `error` or `embedding` is set."""
    finish_reason: FinishReason | None
    num_cached: int
    export: Export | None = None
    """Set if the sequence exports its pages and has sampled its token; the receiver then owns the references."""
    kept: Export | None = None
    """Pages of the full blocks, without references; set if the sequence reports its blocks and has ended. The pages are
    valid until their epochs change."""
    error: KvferryError | None = None
    """Set if the sequence failed; it has then ended without a finish reason."""
    scores: tuple[ScoredToken, ...] | None = None
    """The scored tokens of the prompt, from the second one on; only in the first update, if they were requested."""
    embedding: npt.NDArray[np.float32] | None = None
    """The pooled vector of a pooling request, which has then ended."""
    num_loaded: int = 0
    """Number of prompt tokens whose KV was loaded from a peer or a tier."""
    num_written: int = 0
    """Number of prompt tokens whose KV was computed and is in the prefix cache."""
    computed: tuple[ComputedTokens, ...] = ()
    """Prompt tokens that were computed since the previous update, by cause."""
