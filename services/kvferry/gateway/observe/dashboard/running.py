"""The samples that run and the requests that wait, for operators: how old, in which state, on which workers.

A list is bounded, and has neither text nor tokens nor keys.
"""

import heapq
from collections.abc import Collection
from dataclasses import dataclass

from kvferry.gateway.decide.lifecycle.sample_run import SampleRun
from kvferry.gateway.decide.lifecycle.sample_states import State
from kvferry.serving.admission import RequestSize

MAX_RUNNING = 50
"""Maximum number of entries in a list: the oldest ones."""
_STATES = {
    State.QUEUED: "queued",
    State.PREFILLING: "prefill",
    State.OFFERED: "handoff",
    State.FETCHING: "handoff",
    State.DECODING: "decode",
}


@dataclass(frozen=True, slots=True)
class RunningSample:
    """A sample that has not ended, or a request that waits for its admission."""

    request_id: str
    tenant: str
    sample_index: int
    state: str
    """`queued` (waiting for its admission, or between two attempts), `prefill`, `handoff`, `decode`, `search` (a beam
    search), or the outcome of a sample whose last tokens have not been taken yet."""
    age_seconds: float
    """Seconds since the arrival of the request."""
    prompt_tokens: int
    """Tokens of the prompt; of all prompts for a request that waits."""
    output_tokens: int
    beam_width: int
    """Number of beams of a beam search that runs; 0 otherwise."""
    prefill_worker: str
    """Name of the worker that computes or has computed the prompt; empty if there is none, or the next one has it."""
    decode_worker: str
    """Name of the worker that generates; empty before it is called."""


def oldest(
    runs: Collection[SampleRun], waiting: Collection[RequestSize], now: float, limit: int = MAX_RUNNING
) -> tuple[list[RunningSample], int]:
    """Return the oldest samples and waiting requests, oldest first, and the number of those left out.

    Args:
        runs: the samples and searches that have not ended.
        waiting: the requests that wait for their admission.
        now: monotonic seconds.
        limit: maximum length of the list.
    """
    found: list[tuple[float, SampleRun | RequestSize]] = [
        *((run.request.caller.arrived, run) for run in runs),
        *((size.caller.arrived, size) for size in waiting),
    ]
    chosen = heapq.nsmallest(limit, found, key=lambda one: one[0])
    listed = [_run(one, now) if isinstance(one, SampleRun) else _waiting(one, now) for _, one in chosen]
    return listed, len(found) - len(listed)


def state_of(run: SampleRun) -> str:
    """Return the state of a sample in the words of `RunningSample.state`."""
    if run.num_beams:
        return "search"
    if run.state is State.DECODING and not run.emitted:
        return "prefill"  # on the worker that then generates
    return _STATES.get(run.state, run.state.value)


def _run(run: SampleRun, now: float) -> RunningSample:
    caller = run.request.caller
    return RunningSample(
        caller.request_id,
        caller.tenant,
        run.request.sample_index,
        state_of(run),
        _age(caller.arrived, now),
        len(run.request.token_ids),
        run.num_output,
        run.num_beams,
        run.timing.prefill_worker,
        run.timing.decode_worker,
    )


def _waiting(size: RequestSize, now: float) -> RunningSample:
    caller = size.caller
    num_prompt = sum(map(len, size.prompts))
    return RunningSample(
        caller.request_id, caller.tenant, 0, "queued", _age(caller.arrived, now), num_prompt, 0, 0, "", ""
    )


def _age(arrived: float, now: float) -> float:
    return round(max(0.0, now - arrived), 3)
