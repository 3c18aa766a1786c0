"""Drives a runner without scheduler and block pool, with step plans over statically assigned pages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from kvferry.core.ids import BlockId, RequestId
from kvferry.core.sampling import SampledToken, SamplingParams
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.schedule.step.adapter_slots import NO_SLOT
from kvferry.engine.schedule.step.step import ScheduledSequence, StepPlan

GREEDY = SamplingParams(temperature=0)
ChunkSize = Callable[[int], int]
"""Function from the number of remaining tokens to the number of tokens to schedule now."""


@dataclass(slots=True)
class Generation:
    """State of a sequence."""

    prompt: Sequence[int]
    max_tokens: int
    blocks: Sequence[BlockId]
    params: SamplingParams = GREEDY
    sample_index: int = 0
    stops: frozenset[int] = frozenset()
    adapter_slot: int = NO_SLOT
    tokens: list[int] = field(init=False)
    computed: int = 0
    sampled: list[SampledToken] = field(default_factory=list)
    version: int = field(default_factory=count(1).__next__)
    """Version of the block table: unique, and constant because the blocks never change."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def is_done(self) -> bool:
        """Whether `max_tokens` tokens have been generated, or the last token is a stop token."""
        return len(self.sampled) >= self.max_tokens or (bool(self.sampled) and self.tokens[-1] in self.stops)


def everything(remaining: int) -> int:
    """Schedule all remaining tokens in one step, without chunking."""
    return remaining


def generate(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    chunk: ChunkSize = everything,
    stops: frozenset[int] = frozenset(),
    slots: Sequence[int] = (),
) -> list[Generation]:
    """Generate for all prompts in one batch; each step schedules `chunk` tokens of each unfinished sequence. `slots`
    has the slot of each prompt's adapter; empty: none has an adapter."""
    block_tokens, dealt = runner.kv.layout.block_tokens, 0
    generations = []
    for index, prompt in enumerate(prompts):
        own = params if isinstance(params, SamplingParams) else params[index]
        needed = -(-(len(prompt) + max_tokens) // block_tokens)
        # Assigned from the end, so that pages are not in order of position.
        blocks = [BlockId(runner.kv.num_blocks - 1 - dealt - i) for i in range(needed)]
        dealt += needed
        slot = slots[index] if slots else NO_SLOT
        generations.append(Generation(prompt, max_tokens, blocks, own, stops=stops, adapter_slot=slot))
    assert dealt <= runner.kv.num_blocks, f"{dealt} pages are needed"
    while running := [g for g in generations if not g.is_done]:
        step(runner, running, chunk)
    return generations


def step(runner: Runner, running: Sequence[Generation], chunk: ChunkSize = everything) -> None:
    """Run a step of the given sequences."""
    plan = []
    for index, g in enumerate(running):
        remaining = len(g.tokens) - g.computed
        now = min(remaining, max(1, chunk(remaining)))
        request = RequestId(str(index))
        plan.append(
            ScheduledSequence(
                request_id=request,
                token_ids=g.tokens,
                num_prompt=len(g.prompt),
                num_computed=g.computed,
                num_scheduled=now,
                block_ids=g.blocks,
                num_sampled=int(now == remaining),
                sampling=g.params,
                sample_index=g.sample_index,
                table_version=g.version,
                adapter_slot=g.adapter_slot,
            )
        )
    result = runner.run(StepPlan(tuple(plan)))
    for g, scheduled in zip(running, plan, strict=True):
        g.computed += scheduled.num_scheduled
        if scheduled.samples:
            (token,) = result.outputs[scheduled.request_id].tokens
            g.sampled.append(token)
            g.tokens.append(token.token_id)
