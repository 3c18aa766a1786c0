"""An engine for a runner, without a loaded model."""

from kvferry.core.clock import Clock
from kvferry.core.hashing import BlockNamers
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.engine import Engine
from kvferry.engine.parts import KvPages, ServedModel, assemble
from kvferry.engine.schedule.plan.pipeline import StepRunner
from kvferry.engine.schedule.speculation.speculation import Speculation


def engine_for(
    runner: StepRunner,
    *,
    num_blocks: int,
    block_tokens: int,
    max_model_tokens: int,
    vocab_size: int,
    limits: SchedulerLimits,
    eos_token_ids: tuple[int, ...] = (),
    windows: tuple[int | None, ...] = (None,),
    speculation: Speculation | None = None,
    runs_ahead: bool = True,
    pin_share: float = 0.25,
    retention_share: float = 0.25,
    clock: Clock | None = None,
) -> Engine:
    """Create an engine that names blocks with a key of its own."""
    parts = assemble(
        runner,
        ServedModel(max_model_tokens, vocab_size, eos_token_ids, b"test layout"),
        KvPages(num_blocks, block_tokens, windows),
        limits,
        BlockNamers(b"secret"),
        speculation=speculation,
        runs_ahead=runs_ahead,
        pin_share=pin_share,
        retention_share=retention_share,
        clock=clock,
    )
    return Engine(parts)
