"""Interface between speculation and a draft model, or heads on the target model."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine.schedule.speculation.row_prices import RowPrices
from kvferry.engine.schedule.step.step import DraftSource


class Drawing(NamedTuple):
    """Parameters with which a draft model draws tokens for the rejection rule, instead of taking the most probable
    ones."""

    sampling: SamplingParams
    """The request's parameters, with a seed."""
    sample_index: int
    excluded: frozenset[int]
    """Tokens that end the sequence; they are not drafted."""


class DraftRequest(NamedTuple):
    """A sequence for which draft tokens are requested."""

    request_id: RequestId
    tokens: Sequence[int]
    """Tokens of the sequence."""
    limit: int
    """Maximum number of draft tokens, at least 1."""
    drawing: Drawing | None = None
    """How a draft model draws the tokens; `None` takes the most probable ones. Heads ignore it."""
    width: int = 1
    """Maximum number of candidates for a token: with more than 1, heads propose a tree of at most `limit` levels."""


class ModelDraft(NamedTuple):
    """Draft tokens, and the support of each (`acceptance`)."""

    tokens: tuple[int, ...]
    supports: tuple[int, ...]
    sources: tuple[DraftSource, ...] = ()
    """Distribution of each token, if the tokens were drawn; otherwise empty."""
    parents: tuple[int, ...] = ()
    """Row of each token's parent in a tree (`schedule.step.draft_tree`); empty for a chain."""


class ModelDrafts(Protocol):
    """Proposes tokens by computing a draft model or heads."""

    @property
    def prices(self) -> RowPrices:
        """Estimated duration of the draft model's steps by their number of rows."""
        ...

    @property
    def is_measured(self) -> bool:
        """Whether `prices` has a measurement."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether no sequence has a state or pages."""
        ...

    def propose(self, requests: Sequence[DraftRequest], depth: int) -> dict[RequestId, ModelDraft]:
        """Propose at most `depth` tokens for each sequence; sequences without a draft are absent.

        Args:
            requests: the sequences, with their tokens.
            depth: maximum number of draft tokens of a sequence.
        """
        ...

    def forget(self, request_id: RequestId) -> None:
        """Free everything that a sequence holds. Idempotent."""
        ...


@runtime_checkable
class HiddenReader(Protocol):
    """Heads: `ModelDrafts` that read hidden states of the target model."""

    def read(self, request_id: RequestId, position: int, hidden: npt.NDArray[np.float32]) -> None:
        """Record the hidden states [N, width] of a sequence's accepted tokens from a position on.

        Args:
            request_id: id of the sequence's request.
            position: position of the first state.
            hidden: hidden states of accepted tokens, [N, width].
        """
        ...
