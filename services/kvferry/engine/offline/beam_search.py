"""Beam search with an engine: in each round, one request per live beam of every prompt.

A request computes only what the prefix cache does not have: the last, partly filled block of its beam. Beams of a
prompt therefore share the pages of all full blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from kvferry.core.errors import InvalidRequest, InvariantBroken
from kvferry.core.ids import RequestId
from kvferry.core.sampling import FinishReason
from kvferry.engine.engine import Engine
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.text.requests.beams import Alternatives, Beam, BeamParams, Beams

_numbers = count(1)
_MAX_LIVE = 512
"""Maximum number of requests at a time; an engine rejects more than 1024 waiting ones."""


@dataclass(frozen=True, slots=True)
class BeamOutput:
    """One output of a beam search."""

    text: str
    """Text of the output; empty if the model has no tokenizer."""
    token_ids: tuple[int, ...]
    cumulative_logprob: float
    """Sum of the log-probabilities of the tokens."""
    score: float
    """The sum divided by the length to the power of the length penalty; outputs are ordered by this score."""
    finish_reason: FinishReason


def search(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: BeamParams,
    eos_token_ids: Sequence[int],
    on_done: Callable[[], None] = lambda: None,
) -> list[list[Beam]]:
    """Search for the best outputs of each prompt; return at most `width` for each, the best first.

    Args:
        engine: an idle engine, which no other thread uses.
        prompts: prompts as token ids.
        params: parameters of the search; an output ends at the latest when the context is full.
        eos_token_ids: the model's end-of-sequence tokens.
        on_done: called for each prompt whose search is done.

    Raises:
        InvalidRequest: a prompt is empty or too long.
        GenerationFailed: a logit is not finite.
    """
    searches = [new_beams(prompt, params, engine.max_model_tokens, eos_token_ids) for prompt in prompts]
    together = _MAX_LIVE // params.width
    for first in range(0, len(prompts), together):
        group = list(zip(prompts, searches, strict=True))[first : first + together]
        while group := [(prompt, beams) for prompt, beams in group if not beams.is_done]:
            live = [(prompt, beam) for prompt, beams in group for beam in beams.live]
            found = iter(_alternatives(engine, live, params))
            for _, beams in group:
                beams.advance([next(found) for _ in beams.live])
                if beams.is_done:
                    on_done()
    return [beams.best(params.width) for beams in searches]


def checked_beam_params(params: object) -> BeamParams:
    """Return the parameters of a search; the defaults for `None`.

    Raises:
        InvalidRequest: `params` is neither a `BeamParams` nor `None`.
    """
    if params is None:
        return BeamParams()
    if not isinstance(params, BeamParams):
        raise InvalidRequest(f"params must be a BeamParams, not {type(params).__name__}", field="params")
    return params


def new_beams(prompt: Sequence[int], params: BeamParams, max_model_tokens: int, eos_token_ids: Sequence[int]) -> Beams:
    """Return the state of a search that begins.

    Args:
        prompt: token ids of the prompt.
        params: width and limits of the search; `max_tokens` is reduced to what fits in the context.
        max_model_tokens: context length in tokens.
        eos_token_ids: ids that end an output.
    """
    limit = max(1, min(params.max_tokens, max_model_tokens - len(prompt)))
    return Beams(replace(params, max_tokens=limit), frozenset(eos_token_ids))


def step_request(prompt: Sequence[int], beam: Beam, params: BeamParams) -> EngineRequest:
    """Return the request for the next token of a beam of a prompt, with its alternatives.

    Args:
        prompt: token ids of the prompt.
        beam: the beam, whose tokens follow the prompt.
        params: parameters of the search.
    """
    return EngineRequest(
        RequestId(f"beam-{next(_numbers)}"),
        [*prompt, *beam.tokens],
        params.step_sampling(len(beam.tokens) + 1),
        num_generated=len(beam.tokens),
    )


def _alternatives(
    engine: Engine, beams: Sequence[tuple[Sequence[int], Beam]], params: BeamParams
) -> list[Alternatives]:
    """Return the most likely next tokens of each beam."""
    found: dict[RequestId, Alternatives] = {}
    requests = [step_request(prompt, beam, params) for prompt, beam in beams]
    names = [request.request_id for request in requests]
    try:
        for request in requests:
            engine.add(request)
        while len(found) < len(names):
            if not engine.has_work:
                raise InvariantBroken("the engine has no work although beams are waiting for tokens")
            for update in engine.step().updates:
                if update.error is not None:
                    raise update.error
                found[update.request_id] = update.tokens[0].top
    except BaseException:
        for name in names:
            engine.abort(name)
        raise
    return [found[name] for name in names]
