"""Random interleavings of a scheduler with drafts of every proposer: each request has the tokens of a run without
drafts.

The runs have few pages and include chunked prompts, shared prefixes, preemption, hand-offs, late masks, aborts, and
greedy and seeded requests. The proposers are those of the product and adversarial ones, whose drafts are all right, all
wrong, or wrong at random.
After each step, the pages of all named blocks hold the tokens of their names, and offered pages hold no rejected token.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from harness.drafts.draft_models import RandomTrees, draft_model, medusa_drafts
from harness.drafts.proposers import Oracle, Silent, TickingClock
from harness.fakes.engines import POISON, a_request, an_engine, drawn_token, next_allowed, small_limits
from harness.fakes.heads import eagle_drafts
from harness.fakes.masks import FakeMasks, allowed_after, constrained, with_constraint
from kvferry.core.ids import RequestId
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.speculation.draft_depth import DraftDepth
from kvferry.engine.schedule.speculation.draft_lengths import PayingDrafts, WholeDrafts
from kvferry.engine.schedule.speculation.model_drafts import HiddenReader, ModelDrafts
from kvferry.engine.schedule.speculation.proposers import NgramProposer, Proposer, SuffixProposer
from kvferry.engine.schedule.speculation.speculation import Speculation

EOS = 96
TEXTS = ("oracle", "suffix", "ngram", "none")
MODELS = ("none", "draft", "eagle", "medusa", "trees")
WRONG = {"best": 0.0, "rarely wrong": 0.1, "often wrong": 0.5, "worst": 1.0}
"""Probability that a token of the oracle, or of the model, is wrong."""


class Walk:
    """One random interleaving."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        self.text, self.model, self.quality = pick(TEXTS), pick(MODELS), pick(list(WRONG))
        chance = WRONG[self.quality]
        depth = pick((1, 3, 8))
        model = self._model(pick, lambda: self.random.random() < chance)
        speculation = Speculation(
            self._proposer(lambda: self.random.random() < chance),
            pick((WholeDrafts, PayingDrafts))(),
            num_drafts=depth,
            draft_model=model,
            depth=DraftDepth(depth, is_fixed=pick((True, False))),
            width=pick((1, 2, 4)) if self.model != "draft" else 1,
        )
        limits = small_limits(
            scheduling=pick(("fcfs", "priority", "srtf", "two-level", "weighted")),
            token_budget=pick((6, 16, 64)),
            max_chunk_tokens=pick((3, 8, 64)),
            max_num_seqs=pick((1, 2, 4)),
        )
        self.engine, self.runner = an_engine(
            num_blocks=pick((12, 16, 40)),
            max_model_tokens=48,
            limits=limits,
            speculation=speculation,
            clock=TickingClock(),
        )
        self.speculation = speculation
        self.runner.has_head = isinstance(model, HiddenReader)
        self.masks: FakeMasks = constrained(self.engine, [pick((0, 0, 1, 3)) for _ in range(7)])
        self.requests: dict[str, EngineRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.exported: set[str] = set()
        self.seen: Counter[str] = Counter()

    def _proposer(self, is_wrong: Callable[[], bool]) -> Proposer:
        if self.text == "suffix":
            return SuffixProposer(min_length=1)
        if self.text == "ngram":
            return NgramProposer(min_length=1, max_length=3)
        return Oracle(is_wrong) if self.text == "oracle" else Silent()

    def _model(self, pick: Callable[[Any], Any], is_wrong: Callable[[], bool]) -> ModelDrafts | None:
        """Return a draft model or heads, with few or many pages, or `None`."""
        num_blocks = pick((4, 12, 60))
        if self.model == "none":
            return None
        if self.model == "trees":
            return RandomTrees(self.random, is_wrong)
        if self.model == "medusa":
            medusa = medusa_drafts(is_wrong)
            medusa._clock = TickingClock(0.0001)
            return medusa
        found = (draft_model if self.model == "draft" else eagle_drafts)(is_wrong, num_blocks)
        found._clock = TickingClock(0.0001)
        return found

    def run(self) -> Counter[str]:
        """Run the interleaving; return the number of occurrences of each event, such as `preempted`."""
        for number in range(self.random.randrange(3, 9)):
            self.arrive(f"r{number}")
            for _ in range(self.random.randrange(5)):
                self.step()
            if self.random.random() < 0.15:
                name = self.random.choice(list(self.requests))
                if self.engine.abort(RequestId(name)):
                    self.aborted.add(name)
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.step()
        assert self.engine.is_idle, self.engine.load()
        assert self.speculation.is_idle
        for name, request in self.requests.items():
            self.check(name, request)
        accepted = self.speculation.counts.num_accepted_tokens
        self.seen[f"{self.text}, {self.model}: accepted"] += accepted
        self.seen[f"{self.text}, {self.model}: drafted"] += self.speculation.counts.num_draft_tokens
        self.seen[f"{self.quality}: accepted"] += accepted
        self.seen["rejected"] += self.runner.num_poisoned
        trees = [item for plan in self.runner.steps for item in plan.scheduled if item.parents]
        self.seen[f"{self.model}: trees"] += len(trees)
        self.seen["preempted"] += self.engine.scheduler.num_preemptions
        return self.seen

    def arrive(self, name: str) -> None:
        prefix = [5, 6, 7, 8, 9, 10, 11, 12][: self.random.randrange(9)]
        prompt = [*prefix, *(self.random.randrange(96) for _ in range(self.random.randrange(1, 12)))]
        request = a_request(
            name,
            prompt,
            max_tokens=self.random.randrange(1, 20),
            exports=self.random.random() < 0.15,
            priority=self.random.randrange(3),
        )
        if self.random.random() < 0.3 and not request.exports:
            request = with_constraint(request)
        if self.random.random() < 0.2:
            request = replace(request, sampling=replace(request.sampling, min_tokens=self.random.randrange(1, 9)))
        if self.random.random() < 0.5:
            sampled = replace(request.sampling, temperature=1.0, seed=self.random.randrange(1 << 32))
            request = replace(request, sampling=sampled, sample_index=self.random.randrange(3))
        if self.random.random() < 0.3:
            stops = tuple(self.random.randrange(96) for _ in range(6))
            request = replace(request, sampling=replace(request.sampling, stop_token_ids=stops))
        self.requests[name] = request
        self.tokens[name] = []
        self.engine.add(request)

    def step(self) -> None:
        output = self.engine.step()
        for update in output.updates:
            assert update.error is None
            self.tokens[update.request_id] += [token.token_id for token in update.tokens]
        self.engine.check_integrity()
        self.check_pages()
        for update in output.updates:
            if update.export is not None:
                self.seen["offered"] += 1
                self.check_offer(update.export.blocks, self.requests[update.request_id].token_ids)
        for name, number in output.exports.items():
            self.exported.add(name)
            self.engine.release_export(number)

    def check_pages(self) -> None:
        """Check that the page of each named block holds the tokens of its name."""
        for block, (_, tokens) in self.engine.allocator.index._content_of.items():
            assert tuple(self.runner.pages[block]) == tokens, "a named page holds other tokens"
            self.seen["named"] += 1

    def check_offer(self, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        """Check that offered pages hold a prompt."""
        held = [token for block in blocks for token in self.runner.pages[block]][: len(tokens)]
        assert held == list(tokens)
        assert POISON not in held

    def check(self, name: str, request: EngineRequest) -> None:
        tokens = list(request.token_ids)
        count = len(self.tokens[name])
        for _ in range(count):
            token = drawn_token(tokens, request.sampling, request.sample_index)
            if request.sampling.constraint is not None:
                token = next_allowed(token, allowed_after(tokens[len(request.token_ids) :]))
            tokens.append(token)
        stops = request.sampling.stop_token_ids
        assert self.tokens[name] == tokens[len(request.token_ids) :], name
        if name not in self.aborted and name not in self.exported and tokens[-1] not in (EOS, *stops):
            assert count == min(request.sampling.max_tokens or 0, 48 - len(request.token_ids)), name
