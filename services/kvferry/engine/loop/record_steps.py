"""Begins and ends a recording of an engine, between two of its steps."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvferry.core.clock import Clock
from kvferry.engine.observe.recording import Recording
from kvferry.engine.observe.step_log import EngineFacts
from kvferry.engine.observe.watch import NO_WATCH

if TYPE_CHECKING:  # the engine imports this package
    from kvferry.engine.engine import Engine


def begin_recording(
    engine: "Engine",
    clock: Clock,
    *,
    steps: int,
    model: str,
    has_tokens: bool = False,
    resets_cache: bool = False,
    on_full: Callable[[], object] = lambda: None,
) -> Recording:
    """Begin recording an engine's steps. The log can be replayed if the engine is idle and its prefix cache empty.

    Args:
        engine: the engine, on the thread that owns it.
        clock: measures the phases.
        steps: number of steps to record.
        model: name of the model, for the log.
        has_tokens: whether the log has tokens; see `Recording`.
        resets_cache: whether to empty the prefix cache first.
        on_full: called on the engine's thread when all steps are recorded.
    """
    if resets_cache:
        engine.reset_prefix_cache()
    allocator = engine.allocator
    facts = EngineFacts(
        allocator.pool.num_blocks, allocator.block_tokens, engine.scheduler.limits, engine.runs_ahead, model
    )
    obstacle = ""
    if not engine.is_idle:
        obstacle = "requests were running when the recording began"
    elif allocator.index.blocks():
        obstacle = "the prefix cache was not empty when the recording began; reset it first"
    elif allocator.windows != (None,):
        obstacle = "pages behind sliding windows are released, which a replay does not simulate"
    elif engine.scheduler.blocks.object_blocks:
        obstacle = "KV from tiers is loaded at times that the log does not contain"
    recording = Recording(
        facts, clock, steps=steps, has_tokens=has_tokens, obstacle=obstacle, first_export=engine.num_exports,
        on_full=on_full,
    )  # fmt: skip
    engine.observe(recording)
    return recording


def end_recording(engine: "Engine", recording: Recording) -> None:
    """End a recording, full or not."""
    engine.observe(NO_WATCH)
    recording.finish()
