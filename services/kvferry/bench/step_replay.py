"""Replays a step log with a real engine, and checks that schedule and tokens are the same."""

from dataclasses import dataclass, replace

from kvferry.core.errors import UsageError, shortened
from kvferry.core.hashing import BlockNamers
from kvferry.core.ids import RequestId
from kvferry.core.process.memory import usable_memory
from kvferry.core.settings.engine import OFF, ON, EngineSettings
from kvferry.engine.build import build_engine, load_model, runner_for
from kvferry.engine.engine import Engine
from kvferry.engine.observe.log_file import replayed, sampling_of
from kvferry.engine.observe.step_log import ABORT, ADD, RELEASE, LoggedRequest, Planned, StepLog, planned
from kvferry.engine.observe.watch import NO_WATCH, StepWatch
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.step.kv_jobs import SequenceUpdate
from kvferry.engine.schedule.step.step import StepPlan

Tokens = list[tuple[int, list[int]]]


@dataclass(frozen=True, slots=True)
class EngineReplay:
    """Result of a replay with an engine."""

    num_steps: int
    """Number of steps that were compared."""
    num_tokens: int
    """Number of tokens that were compared."""
    schedule_differs_at: int | None = None
    """Number of the first step that was planned differently; `None` if there is none."""
    tokens_differ_at: int | None = None
    """Number of the first step with a different token; `None` if there is none."""

    @property
    def is_equal(self) -> bool:
        """Whether schedule and tokens matched the log."""
        return self.schedule_differs_at is None and self.tokens_differ_at is None


class _Seen(StepWatch):
    """The plan and the tokens of the last step."""

    def __init__(self) -> None:
        self.plan: list[Planned] = []
        self.tokens: Tokens = []

    def stepped(self, plan: StepPlan, updates: list[SequenceUpdate], *, is_ahead: bool) -> None:  # type: ignore[override]
        self.plan = planned(plan)
        self.tokens = [(int(u.request_id), [token.token_id for token in u.tokens]) for u in updates]


def engine_for(log: StepLog, settings: EngineSettings) -> Engine:
    """Build an engine like the recorded one.

    Args:
        log: the log. Its page count, limits and asynchronous steps override the settings.
        settings: the model.

    Raises:
        UsageError: the log's number of pages does not fit into memory with this model.
        KvferryError: the model cannot be loaded.
    """
    facts = log.engine
    loaded = load_model(
        replace(
            settings,
            limits=facts.limits,
            block_tokens=facts.block_tokens,
            async_steps=ON if facts.runs_ahead else OFF,
        )
    )
    kv_bytes, memory = facts.num_blocks * loaded.layout.block_bytes, usable_memory()
    if kv_bytes > memory:
        raise UsageError(
            f"the {facts.num_blocks} pages of the step log take {kv_bytes} bytes with {loaded.config.name}, more "
            f"than the {memory} bytes of memory; the log was recorded with {shortened(repr(facts.model))}: set --model",
            field="log",
        )
    loaded = replace(loaded, kv_bytes=kv_bytes)
    return build_engine(loaded, runner_for(loaded), namers=BlockNamers(b"replay"))


def replay(log: StepLog, engine: Engine) -> EngineReplay:
    """Apply the events of a log to an idle engine, between the same steps, and compare its plans and tokens.

    Args:
        log: a log with tokens.
        engine: an engine with the log's number of pages, tokens per page and limits, and the same model; its prefix
            cache is emptied.

    Raises:
        UsageError: the log cannot be replayed, has no tokens, or is inconsistent, or the engine differs.
    """
    if log.obstacle or not log.has_tokens:
        why = log.obstacle or "it has no tokens; record them with --tokens"
        raise UsageError(f"the step log cannot be replayed with an engine: {why}", field="log")
    facts, allocator = log.engine, engine.allocator
    found = (allocator.pool.num_blocks, allocator.block_tokens, engine.scheduler.limits, engine.runs_ahead)
    needed = (facts.num_blocks, facts.block_tokens, facts.limits, facts.runs_ahead)
    names = ("number of pages", "tokens per page", "limits of a step", "asynchronous steps")
    for name, has, needs in zip(names, found, needed, strict=True):
        if has != needs:
            raise UsageError(
                f"the engine's {name} must equal those of the log: {needs}, not {has}; build it with `engine_for`",
                field="log",
            )
    engine.reset_prefix_cache()
    seen, first_export = _Seen(), engine.num_exports
    engine.observe(seen)
    num_tokens = 0
    try:
        for number, step in enumerate(log.steps):
            with replayed(number):
                for event, which in step.events:
                    _apply(engine, log, event, which, first_export)
                engine.step()
            if seen.plan != step.plan:
                return EngineReplay(number, num_tokens, schedule_differs_at=number)
            if seen.tokens != step.tokens:
                return EngineReplay(number, num_tokens, tokens_differ_at=number)
            num_tokens += sum(len(ids) for _, ids in step.tokens)
        return EngineReplay(len(log.steps), num_tokens)
    finally:
        engine.observe(NO_WATCH)
        for which in log.requests:
            engine.abort(RequestId(str(which)))


def _apply(engine: Engine, log: StepLog, event: str, which: int, first_export: int) -> None:
    if event == ADD:
        engine.add(_request(log.requests[which]))
    elif event == ABORT:
        engine.abort(RequestId(str(which)))
    elif event == RELEASE:
        engine.release_export(first_export + which)
    else:
        engine.reset_prefix_cache()


def _request(logged: LoggedRequest) -> EngineRequest:
    sampling = sampling_of(logged)
    # The recorded engine may have had a shorter context length than this one.
    sampling = replace(sampling, max_tokens=logged.max_tokens_total - logged.num_prompt)
    return EngineRequest(
        RequestId(str(logged.number)),
        logged.tokens[: logged.num_given],
        sampling,
        num_generated=logged.num_generated,
        sample_index=logged.sample_index,
        priority=logged.priority,
        scope=str(logged.scope),
        exports=logged.exports,
        keeps=logged.keeps,
    )
