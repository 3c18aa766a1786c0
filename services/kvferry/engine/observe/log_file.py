"""Reads and writes step logs as JSON lines.

A log without tokens instead has ids of the full blocks of prompt and output, hashed with a key that is not stored.
Reading generates tokens from the ids, so that equal prefixes stay equal; end tokens become `END_TOKEN`.
"""

import json
import math
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from itertools import islice
from random import Random
from typing import Any

from kvferry.core.errors import KvferryError, UsageError, shortened
from kvferry.core.hashing import BlockNamers
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.observe.step_log import ADD, EVENTS, EngineFacts, LoggedRequest, LoggedStep, StepLog
from kvferry.engine.schedule.policies.policy import POLICIES

VERSION = 1
END_TOKEN = (1 << 32) - 1
"""Token that stands for an end token; no vocabulary has it."""
MAX_STEPS = 100_000
MAX_TOKENS = 1 << 22
"""Maximum number of tokens of one request, and of requests in a log."""
_MAX_STEP_TOKENS = 1024
"""Maximum number of tokens that a step samples for one request."""
_FIRST_TOKEN, _NUM_TOKENS = 300, 4000
_ID_BYTES = 6
_FINGERPRINT = b"step log"


def write_log(log: StepLog) -> Iterator[str]:
    """Yield the lines of a log, each with its line break."""
    head = {"kvferry_steps": VERSION, "has_tokens": log.has_tokens, "obstacle": log.obstacle}
    yield _line({**head, "engine": asdict(log.engine)})
    for step in log.steps:
        tokens = [[number, ids if log.has_tokens else len(ids)] for number, ids in step.tokens]
        yield _line({
            "events": step.events, "plan": step.plan, "tokens": tokens, "stopped": step.stopped,
            "is_ahead": step.is_ahead, "begun": round(step.begun, 7), "ended": round(step.ended, 7),
        })  # fmt: skip
    namers = BlockNamers(secrets.token_bytes(32))
    for request in log.requests.values():
        entry = asdict(request)
        if not log.has_tokens:
            namer = namers.of(str(request.scope), fingerprint=_FINGERPRINT, block_tokens=log.engine.block_tokens)
            names = namer.chain(request.tokens)
            entry |= {"tokens": [], "names": [int.from_bytes(name[:_ID_BYTES], "big") for name in names]}
        yield _line({"request": request.number, **entry})


def read_log(lines: Iterable[str]) -> StepLog:
    """Read a log.

    Raises:
        UsageError: a line is invalid; the message names it.
    """
    numbered, number = enumerate(lines, 1), 1
    try:
        _, first = next(numbered, (1, ""))
        log = _head(json.loads(first))
        for number, line in islice(numbered, MAX_STEPS + MAX_TOKENS):  # noqa: B007  for the message
            entry = json.loads(line)
            if "request" in entry:
                request = _request(entry)
                log.requests[request.number] = request
            elif len(log.steps) < MAX_STEPS:
                log.steps.append(_step(entry))
            else:
                raise ValueError(f"the log has more than {MAX_STEPS} steps")
        number = 0
        _complete(log)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, KvferryError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)[:200]
        where = f"line {number} of the step log" if number else "the step log"
        raise UsageError(
            f"{where} is invalid: {reason}; use a log written by kvferry profile --log FILE", field="log"
        ) from error
    return log


def sampling_of(request: LoggedRequest) -> SamplingParams:
    """Return the sampling parameters of a request of a log with tokens.

    Raises:
        UsageError: a parameter is unknown or out of range.
    """
    known = {one.name for one in fields(SamplingParams)} - {"constraint"}
    given: dict[str, Any] = dict(request.sampling)
    if unknown := given.keys() - known:
        raise UsageError(f"the log has an unknown sampling parameter {sorted(unknown)[0]!r}", field="log")
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
        if name in given:
            given[name] = tuple(given[name])
    if "bad_word_token_ids" in given:
        given["bad_word_token_ids"] = tuple(map(tuple, given["bad_word_token_ids"]))
    try:
        return SamplingParams(**given)
    except (KvferryError, TypeError, ValueError) as error:
        raise UsageError(f"the log has invalid sampling parameters: {error}", field="log") from error


@contextmanager
def replayed(step: int) -> Iterator[None]:
    """Report an error in an event or a step as an inconsistent log, for example one that was edited.

    Args:
        step: number of the step in the log, for the message.

    Raises:
        UsageError: replaces the error.
    """
    try:
        yield
    except (KvferryError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {shortened(str(error))}"
        raise UsageError(
            f"the step log is inconsistent at step {step} ({reason}); record it again", field="log"
        ) from error


def _line(entry: object) -> str:
    return json.dumps(entry, separators=(",", ":")) + "\n"


def _head(entry: Any) -> StepLog:
    if entry["kvferry_steps"] != VERSION:
        raise ValueError(f"the version must be {VERSION}, not {str(entry['kvferry_steps'])[:20]}")
    engine = entry["engine"]
    limits = SchedulerLimits(**engine["limits"])
    if limits.scheduling not in POLICIES:
        raise ValueError(f"the scheduling policy {str(limits.scheduling)[:40]!r} is unknown")
    facts = EngineFacts(
        _whole(engine["num_blocks"], 1, 1 << 24), _whole(engine["block_tokens"], 1, 1 << 16), limits,
        bool(engine["runs_ahead"]), str(engine["model"]),
    )  # fmt: skip
    return StepLog(facts, bool(entry["has_tokens"]), str(entry["obstacle"]))


def _step(entry: Any) -> LoggedStep:
    step = LoggedStep(is_ahead=bool(entry["is_ahead"]), begun=_time(entry["begun"]), ended=_time(entry["ended"]))
    for kind, number in entry["events"]:
        if kind not in EVENTS:
            raise ValueError(f"the event {str(kind)[:20]!r} is unknown")
        step.events.append((kind, _whole(number)))
    for request, computed, scheduled, sampled in entry["plan"]:
        step.plan.append((_whole(request), _whole(computed), _whole(scheduled, 1), _whole(sampled)))
    for request, ids in entry["tokens"]:
        tokens = [_whole(one) for one in ids] if isinstance(ids, list) else [-1] * _whole(ids, 0, _MAX_STEP_TOKENS)
        step.tokens.append((_whole(request), tokens))
    step.stopped = [_whole(one) for one in entry["stopped"]]
    return step


def _request(entry: Any) -> LoggedRequest:
    sampling = entry["sampling"]
    if not isinstance(sampling, dict):
        raise TypeError("sampling is not an object")
    return LoggedRequest(
        number=_whole(entry["request"]),
        scope=_whole(entry["scope"]),
        num_prompt=_whole(entry["num_prompt"], 1),
        num_generated=_whole(entry["num_generated"]),
        max_tokens_total=_whole(entry["max_tokens_total"], 1),
        priority=_whole(entry["priority"], -MAX_TOKENS),
        exports=bool(entry["exports"]),
        keeps=bool(entry["keeps"]),
        sample_index=_whole(entry["sample_index"]),
        tokens=[_whole(one) for one in entry["tokens"]],
        names=[_whole(one, 0, 1 << (8 * _ID_BYTES)) for one in entry["names"]],
        sampling=sampling,
    )


def _complete(log: StepLog) -> None:
    """Check that requests and steps match, and generate the tokens of a log without tokens."""
    arrived = {number for step in log.steps for kind, number in step.events if kind == ADD}
    if missing := arrived - log.requests.keys():
        raise ValueError(f"request {min(missing)} has an `add` event but no request line")
    counts = {number: request.num_given for number, request in log.requests.items()}
    for step in log.steps:
        for number, ids in step.tokens:
            if number in counts:
                counts[number] += len(ids)
    for number, request in log.requests.items():
        if not 0 < counts[number] <= MAX_TOKENS:
            raise ValueError(f"request {number} must have 1 to {MAX_TOKENS} tokens, not {counts[number]}")
        if not log.has_tokens:
            request.tokens = _tokens(request, counts[number], log.engine.block_tokens)
        elif len(request.tokens) != counts[number]:
            raise ValueError(f"request {number} has {len(request.tokens)} tokens; its steps need {counts[number]}")
    if not log.has_tokens:
        _fill(log)


def _tokens(request: LoggedRequest, count: int, block_tokens: int) -> list[int]:
    """Generate the tokens of a request from the ids of its blocks; the last, partial block gets unique tokens."""
    tokens: list[int] = []
    for name in (*request.names, f"end of {request.number}"):
        draw = Random(f"{name}")  # noqa: S311  tokens that stand for a block need no secret numbers
        tokens += (_FIRST_TOKEN + draw.randrange(_NUM_TOKENS) for _ in range(block_tokens))
    if len(tokens) < count:
        raise ValueError(f"request {request.number} has {len(request.names)} blocks for {count} tokens")
    return tokens[:count]


def _fill(log: StepLog) -> None:
    """Set the tokens of the steps of a log without tokens, from its requests."""
    at = {number: request.num_given for number, request in log.requests.items()}
    for step in log.steps:
        filled: list[tuple[int, list[int]]] = []
        for number, ids in step.tokens:
            request = log.requests.get(number)
            if request is not None:
                start = at[number]
                at[number] += len(ids)
                ids = request.tokens[start : at[number]]
                if number in step.stopped:
                    ids[-1] = END_TOKEN  # its KV is never computed, so no name depends on it
            filled.append((number, ids))
        step.tokens = filled


def _time(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{shortened(str(value))} is not a time in seconds")
    return float(value)


def _whole(value: object, low: int = 0, high: int = 1 << 53) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{str(value)[:40]} is not a whole number from {low} to {high}")
    return value
