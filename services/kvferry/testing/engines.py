"""Engines without a model: the real scheduler and pools over a runner that computes tokens from tokens.

For tests of decisions only; whatever runs end to end uses the real runner.
"""

from kvferry.core.ids import RequestId
from kvferry.core.sampling import SampledToken, SamplingParams
from kvferry.engine.engine import Engine
from kvferry.engine.messages import EngineRequest
from kvferry.engine.room import SchedulerLimits
from kvferry.engine.sequence import RemoteKv
from kvferry.engine.step import StepPlan, StepResult

VOCAB = 97
EOS = 96


def next_token(tokens: list[int]) -> int:
    """The token after `tokens`: any change anywhere before it changes it; never the end token."""
    state = 7
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state % EOS


class ArithmeticRunner:
    """Keeps "KV" as the token that was computed at each slot of each page, and draws from what it reads there.

    A wrong page, a page reused too early or a position never computed therefore changes the tokens.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.pages: list[list[int | None]] = [[None] * block_tokens for _ in range(num_blocks)]
        self.steps: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.steps.append(plan)
        for copy in plan.copies:
            self.pages[copy.target] = list(self.pages[copy.source])
        for item in plan.scheduled:  # all writes before any read, as a layer does
            for position in range(item.num_computed, item.num_computed + item.num_scheduled):
                block, slot = divmod(position, self.block_tokens)
                self.pages[item.block_ids[block]][slot] = item.token_ids[position]
        drawn: dict[RequestId, SampledToken] = {}
        for item in plan.scheduled:
            if item.samples:
                read = [
                    self.pages[item.block_ids[p // self.block_tokens]][p % self.block_tokens]
                    for p in range(len(item.token_ids))
                ]
                assert None not in read, f"request {item.request_id} read a slot that nobody computed"
                drawn[item.request_id] = SampledToken(next_token([t for t in read if t is not None]))
        return StepResult(drawn)


def small_limits(**changes: int) -> SchedulerLimits:
    """64 tokens a step and 8 sequences, but for the changes."""
    base = {"token_budget": 64, "max_chunk_tokens": 64, "max_sequences": 8}
    return SchedulerLimits(**{**base, **changes}, reserve_share=0.0)


def shares(runner: ArithmeticRunner) -> list[list[tuple[str, int]]]:
    """Per step: who computed how many tokens."""
    return [[(s.request_id, s.num_scheduled) for s in plan.scheduled] for plan in runner.steps]


def an_engine(
    *,
    num_blocks: int = 64,
    block_tokens: int = 4,
    max_model_tokens: int = 128,
    limits: SchedulerLimits | None = None,
) -> tuple[Engine, ArithmeticRunner]:
    """A small engine and the runner under it."""
    runner = ArithmeticRunner(num_blocks, block_tokens)
    engine = Engine(
        runner,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        max_model_tokens=max_model_tokens,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        fingerprint=b"test layout",
        limits=limits or small_limits(),
        tenant_secret=lambda tenant: b"secret of " + tenant.encode(),
    )
    return engine, runner


def a_request(
    name: str,
    tokens: list[int],
    *,
    max_tokens: int = 4,
    exports: bool = False,
    num_generated: int = 0,
    remote: RemoteKv | None = None,
    tenant: str = "",
) -> EngineRequest:
    """A greedy request."""
    return EngineRequest(
        request_id=RequestId(name),
        token_ids=tokens,
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        num_generated=num_generated,
        exports=exports,
        remote=remote,
        tenant=tenant,
    )


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    """What an unlimited engine generates after `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def run_until_idle(engine: Engine, *, max_steps: int = 10_000) -> dict[str, list[int]]:
    """Step until nothing is left to run, checking the engine's laws after each; tokens by request."""
    tokens: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return tokens
        for update in engine.step().updates:
            tokens.setdefault(update.request_id, []).append(update.token.token_id)
        engine.check_integrity()
    raise AssertionError(f"the engine did not come to rest in {max_steps} steps: {engine.load()}")
