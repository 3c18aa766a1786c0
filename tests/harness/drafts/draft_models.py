"""A draft model and Medusa heads without weights, for `ArithmeticRunner`; an EAGLE head is in `harness.fakes.heads`."""

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np

from harness.fakes.engines import EOS, VOCAB, ArithmeticRunner, next_token, state_after
from harness.fakes.heads import candidates
from kvferry.core.ids import RequestId
from kvferry.engine.execute.drafts.draft_model import DraftModel
from kvferry.engine.execute.drafts.head_models import Floats, Predicted
from kvferry.engine.execute.drafts.medusa_drafts import MedusaDrafts
from kvferry.engine.execute.models.model import Logits
from kvferry.engine.schedule.speculation.acceptance import support_of_confidence
from kvferry.engine.schedule.speculation.model_drafts import DraftRequest, ModelDraft
from kvferry.engine.schedule.speculation.row_prices import RowPrices
from kvferry.engine.schedule.step.draft_tree import is_chain
from kvferry.engine.schedule.step.step import ScheduledSequence, StepPlan

BLOCK_TOKENS = 4
_PEAK = 6.0
"""Logit of the predicted token; the others have 0, so that its probability is about 0.8."""


class ArithmeticModel:
    """The runner of a draft model. It stores tokens in its own pages and predicts from what it reads there, as
    `ArithmeticRunner` does: KV of a rejected draft token that is read again changes a prediction or fails."""

    def __init__(self, is_wrong: Callable[[], bool], num_blocks: int, max_model_tokens: int = 1 << 20) -> None:
        self._is_wrong = is_wrong
        self._pages = ArithmeticRunner(num_blocks, BLOCK_TOKENS)
        self.model = SimpleNamespace(config=SimpleNamespace(max_model_tokens=max_model_tokens))
        self.kv = SimpleNamespace(num_blocks=num_blocks, layout=SimpleNamespace(block_tokens=BLOCK_TOKENS))

    def prepare(self, plan: StepPlan) -> StepPlan:
        return plan

    def compute(self, plan: StepPlan) -> SimpleNamespace:
        self._pages.run(plan)
        tokens = [self._predict(item) for item in plan.scheduled if item.num_sampled]
        values = np.zeros((len(tokens), VOCAB), np.float32)
        values[np.arange(len(tokens)), tokens] = _PEAK
        return SimpleNamespace(logits=Logits(values, tokens, [True] * len(tokens)))

    def _predict(self, item: ScheduledSequence) -> int:
        known = [
            self._pages.pages[item.block_ids[p // BLOCK_TOKENS]][p % BLOCK_TOKENS] for p in range(len(item.token_ids))
        ]
        assert known == list(item.token_ids), "the draft model read KV of other tokens"
        return (next_token(list(item.token_ids)) + self._is_wrong()) % EOS


class CheckedDraftModel(DraftModel):
    """A draft model whose tokens of each sequence are compared with the sequence's own."""

    def propose(self, requests: Sequence[DraftRequest], depth: int) -> dict[RequestId, ModelDraft]:
        found = super().propose(requests, depth)
        for one in requests:
            followed = self.pages.sequence(one.request_id)
            assert followed.tokens[: followed.num_known] == list(one.tokens), "the draft model follows other tokens"
        return found


def draft_model(is_wrong: Callable[[], bool], num_blocks: int) -> DraftModel:
    """Create a draft model with a number of pages."""
    return CheckedDraftModel(ArithmeticModel(is_wrong, num_blocks), vocab_size=EOS)  # type: ignore[arg-type]


class ArithmeticHeads:
    """Medusa heads that predict from the hidden states [position, token, checksum] of `ArithmeticRunner`."""

    num_heads = 4

    def __init__(self, is_wrong: Callable[[], bool]) -> None:
        self._is_wrong = is_wrong

    def predict(self, head: int, hidden: Floats, width: int) -> Predicted:
        found: Predicted = []
        for _, _, state in hidden.astype(int).tolist():
            for _ in range(head + 1):
                state = state_after(state, state % EOS)
            found.append(candidates(state, width, self._is_wrong()))
        return found


class RandomTrees:
    """`ModelDrafts` whose trees have random shapes; siblings may have the same token."""

    def __init__(self, chance: random.Random, is_wrong: Callable[[], bool]) -> None:
        self._chance, self._is_wrong = chance, is_wrong
        self.prices, self.is_measured, self.is_idle = RowPrices(), False, True

    def propose(self, requests: Sequence[DraftRequest], depth: int) -> dict[RequestId, ModelDraft]:
        return {one.request_id: self._tree(one, min(depth, one.limit)) for one in requests}

    def _tree(self, one: DraftRequest, limit: int) -> ModelDraft:
        texts, parents = [list(one.tokens)], list[int]()
        for _ in range(self._chance.randrange(1, 13)):
            last = len(texts) - 1
            parent = last if one.width == 1 else self._chance.randrange(max(0, last - 4), last + 1)
            if len(texts[parent]) - len(one.tokens) >= limit:
                continue
            right = next_token(texts[parent])
            texts.append([*texts[parent], (right + 1 + self._chance.randrange(3)) % EOS if self._is_wrong() else right])
            parents.append(parent)
        supports = tuple(support_of_confidence(self._chance.random()) for _ in parents)
        tokens = tuple(text[-1] for text in texts[1:])
        return ModelDraft(tokens, supports, parents=() if is_chain(parents) else tuple(parents))

    def forget(self, request_id: RequestId) -> None:
        pass


def medusa_drafts(is_wrong: Callable[[], bool]) -> MedusaDrafts:
    """Create drafts of `ArithmeticHeads`."""
    return MedusaDrafts(ArithmeticHeads(is_wrong))
