"""Begins and ends a recording of an engine, between two of its steps."""

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.core.clock import Clock
from kvferry.engine.engine import Engine
from kvferry.engine.observe.recording import Recording
from kvferry.engine.observe.step_log import EngineFacts
from kvferry.engine.observe.watch import NO_WATCH


@dataclass(frozen=True, slots=True)
class RecordingSettings:
    """Settings of a recording."""

    clock: Clock
    """Measures the phases."""
    steps: int
    """Number of steps to record."""
    model: str
    """Name of the model, for the log."""
    has_tokens: bool = False
    """Whether the log has tokens; see `Recording`."""
    resets_cache: bool = False
    """Whether to empty the prefix cache first."""
    on_full: Callable[[], object] = lambda: None
    """Called on the engine's thread when all steps are recorded."""


@dataclass(frozen=True, slots=True)
class BeginRecording:
    """Command: begin a recording between two steps."""

    settings: RecordingSettings
    reply: Callable[[Recording], None]
    """Called on the engine's thread."""


@dataclass(frozen=True, slots=True)
class EndRecording:
    """Command: end a recording, full or not."""

    recording: Recording
    reply: Callable[[None], None]
    """Called on the engine's thread."""


def begin_recording(engine: Engine, settings: RecordingSettings) -> Recording:
    """Begin recording an engine's steps. The log can be replayed if the engine is idle and its prefix cache empty.

    Args:
        engine: the engine, on the thread that owns it.
        settings: what is recorded.
    """
    if settings.resets_cache:
        engine.reset_prefix_cache()
    allocator = engine.allocator
    facts = EngineFacts(
        allocator.pool.num_blocks, allocator.block_tokens, engine.scheduler.limits, engine.runs_ahead, settings.model
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
        facts, settings.clock, steps=settings.steps, has_tokens=settings.has_tokens, obstacle=obstacle,
        first_export=engine.num_exports, on_full=settings.on_full,
    )  # fmt: skip
    engine.observe(recording)
    return recording


def end_recording(engine: Engine, recording: Recording) -> None:
    """End a recording, full or not."""
    engine.observe(NO_WATCH)
    recording.finish()
