"""Draft tokens from Medusa heads (Cai et al., Medusa, 2024, section 3.1): the most probable tokens of each head, as a
chain or a tree.

The first head predicts the token after the one that the target model samples from the same hidden state, so a draft
needs only the last hidden state, and no KV.
"""

from collections.abc import Sequence

import numpy as np

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.ids import RequestId
from kvferry.engine.execute.drafts.candidates import model_draft, worth_verifying
from kvferry.engine.execute.drafts.head_models import Floats, MedusaModel
from kvferry.engine.schedule.speculation.model_drafts import DraftRequest, ModelDraft
from kvferry.engine.schedule.speculation.row_prices import RowPrices
from kvferry.engine.schedule.speculation.trees.growing_tree import Candidate, product_tree


class MedusaDrafts:
    """`ModelDrafts` of Medusa heads. Used on the engine's thread."""

    def __init__(self, model: MedusaModel, *, clock: Clock | None = None) -> None:
        """
        Args:
            model: the heads.
            clock: measures their computation.
        """
        self._model, self._clock = model, clock or SystemClock()
        self._last: dict[RequestId, tuple[int, Floats]] = {}
        """Position and hidden state [1, hidden] of the last row of each sequence."""
        self.prices = RowPrices()
        self.is_measured = False

    @property
    def is_idle(self) -> bool:
        return not self._last

    def read(self, request_id: RequestId, position: int, hidden: Floats) -> None:
        """See `HiddenReader.read`."""
        if len(hidden):
            self._last[request_id] = (position + len(hidden) - 1, hidden[-1:].copy())

    def propose(self, requests: Sequence[DraftRequest], depth: int) -> dict[RequestId, ModelDraft]:
        active = [one for one in requests if self._is_state_current(one)]
        levels: dict[RequestId, list[list[Candidate]]] = {}
        for head in range(min(depth, self._model.num_heads)):
            active = [one for one in active if head < one.limit]
            if not active:
                break
            begun = self._clock.monotonic()
            states = np.concatenate([self._last[one.request_id][1] for one in active])
            guesses = self._model.predict(head, states, max(one.width for one in active))
            going: list[DraftRequest] = []
            for one, candidates in zip(active, guesses, strict=True):
                if kept := worth_verifying(candidates, one.width):
                    levels.setdefault(one.request_id, []).append(kept)
                    going.append(one)
            self.prices.observe(len(active), self._clock.monotonic() - begun)
            self.is_measured, active = True, going
        return {name: model_draft(product_tree(own)) for name, own in levels.items()}

    def _is_state_current(self, one: DraftRequest) -> bool:
        """Return whether the hidden state before a sequence's last token is known."""
        last = self._last.get(one.request_id)
        return last is not None and last[0] == len(one.tokens) - 2

    def forget(self, request_id: RequestId) -> None:
        self._last.pop(request_id, None)
