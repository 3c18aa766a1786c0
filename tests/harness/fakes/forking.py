"""Sequences that share pages, driven manually with the real allocator, to test copy-on-write.

parent   [ p0 p1 p2 p3 | p4 p5  .  . ]      fork: both tables contain both pages
child    [ p0 p1 p2 p3 | p4 p5  c  . ]      its first write goes to a copy of the second page
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from harness.fakes.stepping import GREEDY
from kvferry.core.ids import RequestId
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.schedule.blocks.allocation import Allocator
from kvferry.engine.schedule.blocks.block_pool import BlockPool
from kvferry.engine.schedule.blocks.block_table import BlockTable
from kvferry.engine.schedule.blocks.page_copies import PageCopy
from kvferry.engine.schedule.blocks.prefix_index import PrefixIndex
from kvferry.engine.schedule.step.step import ScheduledSequence, StepPlan

_numbers = count()
"""Counter for names of branches, unique in the process; versions of block tables are unique only per allocator."""


@dataclass(slots=True, eq=False)
class Branch:
    """A sequence and its block table."""

    name: str
    tokens: list[int]
    num_prompt: int
    table: BlockTable = field(default_factory=BlockTable)
    computed: int = 0


class Forking:
    """Branches that share the pages of a runner. Steps are planned as in the scheduler: extend tables, then copy on
    write."""

    def __init__(self, runner: Runner) -> None:
        """
        Args:
            runner: runner whose pool has only free pages.
        """
        self.runner = runner
        index = PrefixIndex()
        pool = BlockPool(runner.kv.num_blocks, on_reuse=index.forget)
        self.allocator = Allocator(pool, index, block_tokens=runner.kv.layout.block_tokens)
        self.copies: list[PageCopy] = []
        """All page copies made so far."""

    def start(self, prompt: Sequence[int]) -> Branch:
        """Create a branch without computed tokens."""
        return Branch(f"branch {next(_numbers)}", list(prompt), len(prompt))

    def fork(self, parent: Branch, token: int) -> Branch:
        """Create a second branch that shares the parent's computed KV; `token` follows the computed tokens."""
        made = Branch(
            f"branch {next(_numbers)}",
            [*parent.tokens[: parent.computed], token],
            parent.num_prompt,
            self.allocator.fork(parent.table),
            parent.computed,
        )
        self.allocator.check_integrity()
        return made

    def step(self, branches: Sequence[Branch]) -> None:
        """Run a step that computes all remaining tokens of each branch, and append the sampled token to each branch."""
        copies: list[PageCopy] = []
        scheduled: list[ScheduledSequence] = []
        for branch in branches:
            made = self.allocator.grow(branch.table, num_computed=branch.computed, num_tokens=len(branch.tokens))
            assert made is not None, "the pool is too small for this test"
            copies += made
            scheduled.append(
                ScheduledSequence(
                    request_id=RequestId(branch.name),
                    token_ids=branch.tokens,
                    num_prompt=branch.num_prompt,
                    num_computed=branch.computed,
                    num_scheduled=len(branch.tokens) - branch.computed,
                    block_ids=branch.table.blocks,
                    num_sampled=1,
                    sampling=GREEDY,
                    sample_index=0,
                    table_version=branch.table.version,
                )
            )
        self.copies += copies
        result = self.runner.run(StepPlan(tuple(scheduled), tuple(copies)))
        for branch, share in zip(branches, scheduled, strict=True):
            branch.computed = len(branch.tokens)
            branch.tokens += [token.token_id for token in result.outputs[share.request_id].tokens]
        self.allocator.check_integrity()


def alone(runner: Runner, tokens: Sequence[int], num_more: int) -> list[int]:
    """Return `tokens` followed by `num_more` greedy tokens, computed while no other sequence has pages."""
    forking = Forking(runner)
    branch = forking.start(tokens)
    for _ in range(num_more):
        forking.step([branch])
    return branch.tokens


def check_forks(runner: Runner, prompt: Sequence[int], *, num_more: int = 6) -> None:
    """Fork in the middle of a block, let the branches write in every order, and compare with separate computations.

    Args:
        runner: runner with at least 16 unused pages.
        prompt: longer than a page; its length is not a multiple of the page size.
        num_more: tokens that each branch samples.

    Raises:
        AssertionError: a branch's tokens differ from those of a separate computation, or no page was copied.
    """
    wanted: dict[tuple[int, ...], list[int]] = {}
    for order in ("child first", "parent first", "together"):
        forking = Forking(runner)
        parent = forking.start(prompt)
        forking.step([parent])  # samples a token whose KV is not computed yet
        children = [forking.fork(parent, token) for token in (7, 11)]
        groups = {"child first": [children, [parent]], "parent first": [[parent], children]}
        starts = {id(b): list(b.tokens) for b in (parent, *children)}
        for group in groups.get(order, [[parent, *children]]):
            for _ in range(num_more):
                forking.step(group)
        assert len(forking.copies) == 2, f"three branches share a page, so two must copy it: {forking.copies}"
        for branch in (parent, *children):
            start = tuple(starts[id(branch)])
            if start not in wanted:
                wanted[start] = alone(runner, start, num_more)
            assert branch.tokens == wanted[start], f"{branch.name}, {order}: {branch.tokens}, alone {wanted[start]}"
            forking.allocator.free(branch.table)
        assert forking.allocator.pool.is_idle
