"""Random interleavings of all operations of an engine: each request has the tokens of an isolated run.

One of two engines hands prompts over to the other. The runs have chunks, prefix hits, preemption, cancellation, several
samples of a prompt, branches of an output as in beam search, constraints, drafts, steps launched ahead, loads from the
other engine and from tiers, and stores, with few pages, failures and random delays.
"""

import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from harness.drafts.draft_models import RandomTrees
from harness.engines.account_book import AccountBook
from harness.fakes.delayed import DelayedLoader, DelayedTiers, Offer, QueuedRunner
from harness.fakes.engines import EOS, a_request, an_engine, next_allowed, next_token, small_limits
from harness.fakes.heads import eagle_drafts
from harness.fakes.masks import allowed_after, constrained, with_constraint

from kvferry.core.causes import ComputeCause
from kvferry.core.ids import RequestId
from kvferry.engine.schedule.loads.kv_prefetch import KvPrefetchRequest
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.plan.pipeline import Pipeline
from kvferry.engine.schedule.speculation.draft_depth import DraftDepth
from kvferry.engine.schedule.speculation.draft_lengths import WholeDrafts
from kvferry.engine.schedule.speculation.matches import Tokens
from kvferry.engine.schedule.speculation.proposers import NO_DRAFT, Draft
from kvferry.engine.schedule.speculation.speculation import Speculation
from kvferry.engine.schedule.step.kv_progress import RemoteKv

Windows = tuple[int | None, ...]
WHOLE: Windows = (None,)
"""One group of layers with full attention."""
MAX_TOKENS = 48
SHARED = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
LONG = [[20 + number, *range(30, 46 + number)] for number in range(4)]
"""Prompts that are sent again after other sequences have taken their pages."""


class Guesses:
    """Proposes the tokens that follow, some of them wrong, with the probability `wrong`."""

    def __init__(self, chance: random.Random, wrong: float) -> None:
        self._chance, self._wrong = chance, wrong

    def propose(self, tokens: Tokens, limit: int) -> Draft:
        known = tokens.tolist()
        draft: list[int] = []
        for _ in range(limit):
            token = next_token([*known, *draft])
            draft.append((token + 1) % EOS if self._chance.random() < self._wrong else token)
        return Draft(tuple(draft), 9)


class NoGuesses:
    """A proposer without proposals, so that the drafts come from a head."""

    def propose(self, tokens: Tokens, limit: int) -> Draft:
        return NO_DRAFT


class Side:
    """One engine with its runner, loader and tiers."""

    def __init__(self, chance: random.Random, windows: Windows = WHOLE) -> None:
        pick = chance.choice
        limits = small_limits(
            scheduling=pick(("fcfs", "priority", "srtf", "two-level", "weighted")),
            token_budget=pick((6, 16, 64)),
            max_chunk_tokens=pick((3, 8, 64)),
            max_num_seqs=pick((1, 2, 4, 8)),
        )
        drafts = pick((None, 0.0, 0.3, 1.0))
        speculation = None
        if drafts is not None:
            speculation = Speculation(Guesses(chance, drafts), WholeDrafts(), num_drafts=pick((1, 3, 8)))
        has_head = drafts is not None and chance.random() < 0.5
        if has_head:

            def is_wrong() -> bool:
                return chance.random() < (drafts or 0.0)

            has_random_trees, depth = chance.random() < 0.3, pick((1, 3, 8))
            speculation = Speculation(
                NoGuesses(),
                WholeDrafts(),
                num_drafts=depth,
                draft_model=RandomTrees(chance, is_wrong)
                if has_random_trees
                else eagle_drafts(is_wrong, pick((4, 14, 60))),
                depth=DraftDepth(depth, is_fixed=True),
                width=pick((1, 3)),
            )
        num_blocks = pick((13, 14, 16, 60)) * len(windows)
        self.engine, _ = an_engine(
            num_blocks=num_blocks,
            max_model_tokens=MAX_TOKENS,
            limits=limits,
            speculation=speculation,
            windows=windows,
        )
        self.accounts = AccountBook(self.engine)
        self.runner = QueuedRunner(
            num_blocks, self.engine.allocator.block_tokens, chance, windows, samples_on_host=chance.random() < 0.5
        )
        self.runner.has_head = has_head
        self.engine._pipeline = Pipeline(self.runner, self.engine.allocator, runs_ahead=pick((True, True, False)))
        self.masks = constrained(self.engine, [pick((0, 0, 1, 3)) for _ in range(7)])
        failing = pick((0.0, 0.1, 0.5))
        self.loader = DelayedLoader(self.engine, self.runner, chance, failing)
        self.tiers = DelayedTiers(self.engine, self.runner, chance, failing) if chance.random() < 0.8 else None

    def work(self) -> None:
        """Advance the runner, the loader and the tiers."""
        self.runner.run_some()
        self.loader.work(counts_partly=False)
        if self.tiers is not None:
            self.tiers.work()

    @property
    def is_idle(self) -> bool:
        speculation = self.engine.speculation
        assert not self.engine.is_idle or speculation is None or speculation.is_idle
        return self.engine.is_idle and not self.loader.num_active and not (self.tiers and self.tiers.num_active)


@dataclass
class Asked:
    """A request and its outcome."""

    request: EngineRequest
    side: Side
    tokens: list[int]
    is_over: bool = False
    is_aborted: bool = False
    offer: Offer | None = None


class Walk:
    """One random interleaving."""

    def __init__(self, seed: int, windows: Windows = WHOLE) -> None:
        self.chance = random.Random(seed)
        self.prefill, self.decode = Side(self.chance, windows), Side(self.chance, windows)
        self.asked: dict[str, Asked] = {}
        self.seen: Counter[str] = Counter()

    def run(self) -> None:
        for number in range(self.chance.randrange(3, 12)):
            self.arrive(f"r{number}")
            for _ in range(self.chance.randrange(6)):
                self.turn()
            if self.chance.random() < 0.2:
                self.abort(self.chance.choice(list(self.asked)))
        for _ in range(5000):
            if all(asked.is_over for asked in self.asked.values()) and self.prefill.is_idle and self.decode.is_idle:
                break
            self.turn()
        else:
            raise AssertionError((self.prefill.engine.load(), self.decode.engine.load()))
        for name, asked in self.asked.items():
            self.check(name, asked)
        for side in (self.prefill, self.decode):
            self.seen["preempted"] += side.engine.scheduler.num_preemptions
            for cause, count in side.engine.scheduler.accounts.totals.computed.items():
                self.seen[cause] += count
            self.seen["ahead"] += side.runner.num_ahead
            self.seen["masked ahead"] += side.runner.num_masked_ahead
            self.seen["tier loads"] += side.tiers.num_loads if side.tiers else 0
            if side.engine.speculation is not None:
                accepted = side.engine.speculation.counts.num_accepted_tokens
                self.seen["accepted drafts of a head" if side.runner.has_head else "accepted drafts"] += accepted

    def arrive(self, name: str) -> None:
        """Send one request, several samples of one prompt, or a prompt for a hand-off."""
        draw = self.chance.randrange
        if draw(2):
            prompt = [*SHARED[: draw(13)], *(draw(96) for _ in range(draw(1, 12)))]
        else:
            prompt = [*LONG[draw(4)], *SHARED[: draw(3)]]
        request = a_request(name, prompt, max_tokens=draw(1, 24), priority=draw(3))
        if draw(2):
            stops = tuple(draw(96) for _ in range(8))
            request = replace(request, sampling=replace(request.sampling, stop_token_ids=stops))
        if draw(10) < 3:
            request = with_constraint(request)
        elif draw(10) < 2:
            request = replace(request, sampling=replace(request.sampling, min_tokens=draw(1, 9)))
        if draw(2):
            self.send(replace(request, exports=True), self.prefill)
            return
        for index in range(draw(1, 4)):
            one = replace(request, request_id=RequestId(f"{name}.{index}"), sample_index=index)
            self.send(one, self.chance.choice((self.prefill, self.decode)))

    def send(self, request: EngineRequest, side: Side) -> None:
        self.asked[request.request_id] = Asked(request, side, list(request.token_ids))
        side.engine.add(request)

    def abort(self, name: str) -> None:
        asked = self.asked[name]
        if not asked.is_over:
            assert asked.side.engine.abort(RequestId(name))
            asked.is_over = asked.is_aborted = True
            self.seen["aborted"] += 1

    def turn(self) -> None:
        """Advance both sides in random order."""
        for side in self.chance.sample((self.prefill, self.decode), 2):
            side.work()
            if side.engine.has_work and self.chance.random() < 0.9:
                self.step(side)
        for asked in self.asked.values():
            names = (asked.request.request_id, f"{asked.request.request_id}~")
            if asked.offer is not None and asked.is_over and not asked.side.loader.is_reading(*names):
                asked.offer.release()
                asked.offer = None

    def step(self, side: Side) -> None:
        output = side.engine.step()
        side.engine.check_integrity()
        side.accounts.stepped(output.updates)
        for update in output.updates:
            assert update.error is None
            asked = self.asked[update.request_id]
            asked.tokens += [token.token_id for token in update.tokens]
            if update.request_id in output.exports:
                assert update.export is not None
                self.hand_over(asked, side, update.export.blocks, output.exports[update.request_id])
            elif update.finish_reason is not None:
                asked.is_over = True
                self.branch(asked, side)

    def hand_over(self, asked: Asked, side: Side, blocks: tuple[int, ...], number: int) -> None:
        """Continue a request on the decode side, with or without the prefill side's pages."""
        offer = Offer(side.runner, blocks, lambda: side.engine.release_export(number))  # type: ignore[arg-type]
        num_tokens = len(asked.request.token_ids)
        if asked.tokens[-1] in (EOS, *asked.request.sampling.stop_token_ids) or asked.request.sampling.max_tokens == 1:
            asked.is_over = True
            offer.release()
            return
        self.seen["handed over"] += 1
        asked.side, asked.offer = self.decode, offer
        asked.request = replace(
            asked.request,
            token_ids=list(asked.tokens),
            num_generated=1,
            exports=False,
            remote=RemoteKv(num_tokens, offer),
        )
        if self.chance.random() < 0.5:
            self.prefetch(asked.request, offer)
        self.decode.engine.add(asked.request)

    def prefetch(self, request: EngineRequest, offer: Offer) -> None:
        """Prefetch full blocks of a prompt on the decode side, concurrently with the request."""
        engine = self.decode.engine
        size = engine.allocator.block_tokens
        names = engine.namer(request.scope).chain(request.token_ids[: len(request.token_ids) - request.num_generated])
        if not names:
            return
        first = self.chance.randrange(len(names))
        source = replace(offer, blocks=offer.blocks[first : len(names)])
        tokens = tuple(request.token_ids[: len(names) * size])
        self.seen["prefetches"] += 1
        name = RequestId(f"{request.request_id}~")
        engine.prefetch_kv(KvPrefetchRequest(name, source, first, tuple(names), tokens))

    def branch(self, asked: Asked, side: Side) -> None:
        """Continue, with probability 0.3, an output from its middle with another token, as a beam search does."""
        generated = len(asked.tokens) - self.num_prompt(asked)
        if self.chance.random() < 0.3 and generated > 2 and len(self.asked) < 20:
            kept = self.chance.randrange(1, generated)
            tokens = [*asked.tokens[: self.num_prompt(asked) + kept], self.chance.randrange(EOS)]
            if len(tokens) == MAX_TOKENS:
                return  # no room for an output
            sampling = replace(asked.request.sampling, max_tokens=kept + 4, constraint=None, min_tokens=0)
            name = RequestId(f"{asked.request.request_id}+{len(self.asked)}")
            self.seen["branches"] += 1
            self.send(EngineRequest(name, tokens, sampling, num_generated=kept + 1), side)

    def num_prompt(self, asked: Asked) -> int:
        return len(asked.request.token_ids) - asked.request.num_generated

    def check(self, name: str, asked: Asked) -> None:
        start = self.num_prompt(asked)
        given = len(asked.request.token_ids) if asked.request.remote is None else start
        tokens = asked.tokens[:given]
        while len(tokens) < len(asked.tokens):
            token = next_token(tokens)
            if asked.request.sampling.constraint is not None:
                token = next_allowed(token, allowed_after(tokens[start:]))
            tokens.append(token)
        assert asked.tokens == tokens, name
        if not asked.is_aborted and tokens[-1] not in (EOS, *asked.request.sampling.stop_token_ids):
            limit = min(asked.request.sampling.max_tokens or 0, MAX_TOKENS - start)
            assert len(tokens) - start == limit, name


def walks(seeds: range, windows: Windows = WHOLE) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        walk = Walk(seed, windows)
        try:
            walk.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        seen += walk.seen
    return seen


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_each_request_has_the_tokens_of_an_isolated_run(first: int) -> None:
    seen = walks(range(first, first + 50))
    for what in (
        "preempted",
        "ahead",
        "masked ahead",
        "tier loads",
        "accepted drafts",
        "accepted drafts of a head",
        "aborted",
        "handed over",
        "branches",
        "prefetches",
        ComputeCause.FIRST_SEEN,
        ComputeCause.EVICTED,
        ComputeCause.PARTIAL_BLOCK,
        ComputeCause.LOAD_FAILED,
        ComputeCause.RESUMED,
        ComputeCause.PREEMPTED,
    ):
        assert seen[what] > 0, (what, seen)


@pytest.mark.parametrize("windows", [(None, 6), (None, 3, 11)])
def test_with_windows_too(windows: Windows) -> None:
    """The runners check that all rows find, in every group of layers, what was computed for them."""
    seen = walks(range(60), windows)
    kinds = ("preempted", "ahead", "tier loads", "accepted drafts", "aborted", "handed over", "branches", "prefetches")
    assert all(seen[what] > 0 for what in kinds), seen


@pytest.mark.long
@pytest.mark.parametrize("windows", [WHOLE, (None, 9)])
def test_two_thousand_interleavings(windows: Windows) -> None:
    walks(range(10_000, 12_000), windows)
