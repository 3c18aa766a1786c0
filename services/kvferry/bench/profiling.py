"""Records an engine of this process under a batch of random prompts."""

from collections.abc import Sequence
from typing import Any

from kvferry.bench.inference import Shape
from kvferry.bench.roofline import random_tokens
from kvferry.core.clock import Clock
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine.loop.record_steps import RecordingSettings, begin_recording, end_recording
from kvferry.engine.observe.recording import Recording
from kvferry.engine.observe.timeline import GAP, LANES, TimelinePhase
from kvferry.engine.offline.llm import LLM
from kvferry.engine.schedule.messages import EngineRequest

_WARM_UP = (32, 3)
"""Tokens of prompt and output of a first request, whose steps allocate memory."""


def profile_engine(
    llm: LLM, clock: Clock, *, steps: int, shapes: Sequence[Shape], has_tokens: bool = False
) -> Recording:
    """Run requests, and record up to `steps` steps. A request arrives before each step until all have arrived.

    Args:
        llm: an idle model; its prefix cache is emptied.
        clock: measures the phases.
        steps: maximum number of steps.
        shapes: numbers of prompt and output tokens of each request.
        has_tokens: whether the log contains token ids.
    """
    engine = llm.engine
    _add(llm, "warm-up", _WARM_UP)
    while engine.has_work:
        engine.step()
    settings = RecordingSettings(clock, steps, llm.config.name, has_tokens=has_tokens, resets_cache=True)
    recording = begin_recording(engine, settings)
    pending = list(enumerate(shapes))
    while pending or engine.has_work:
        if pending:
            number, shape = pending.pop(0)
            _add(llm, str(number), shape)
        engine.step()
    end_recording(engine, recording)
    return recording


def _add(llm: LLM, name: str, shape: Shape) -> None:
    num_input, num_output = shape
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    tokens = random_tokens(llm.config, num_input, sum(name.encode()) + len(name))
    llm.engine.add(EngineRequest(RequestId(f"profile-{name}"), tokens, params))


def spans_of(trace: dict[str, Any]) -> list[TimelinePhase]:
    """Return the phases of a Chrome trace that `engine.observe.timeline.chrome_trace` made, without gaps."""
    return [
        TimelinePhase(LANES[event["tid"] - 1], event["name"], event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6)
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["tid"] and event["name"] != GAP
    ]
