"""Converts between domain values and `kvferry.v1` messages; checks sizes and ranges only."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.core.inference.chunks import KvReport
from kvferry.core.inference.pooling import Pooling, PoolingParams
from kvferry.core.limits import MAX_CACHE_SALT_CHARS, MAX_TOKEN_IDS
from kvferry.core.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_SEQUENCES,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_PRIORITY,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    FinishReason,
    SampledToken,
    SamplingParams,
    ScoredToken,
)
from kvferry.v1 import common_pb2

MAX_SAMPLES = 64
"""Maximum number of samples (`n`) per prompt."""
MAX_REQUEST_ID_CHARS = 128
_REQUEST_ID_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:")

_FINISH_TO_WIRE = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
}
_FINISH_FROM_WIRE = {wire: reason for reason, wire in _FINISH_TO_WIRE.items()}
_POOLING_TO_WIRE = {
    Pooling.LAST: common_pb2.POOLING_LAST,
    Pooling.MEAN: common_pb2.POOLING_MEAN,
    Pooling.CLS: common_pb2.POOLING_CLS,
}
_POOLING_FROM_WIRE = {common_pb2.POOLING_UNSPECIFIED: Pooling.LAST} | {
    value: pooling for pooling, value in _POOLING_TO_WIRE.items()
}


def sampling_to_wire(params: SamplingParams) -> common_pb2.SamplingParams:
    """Convert `params` to a message; fields with their default value are omitted."""
    message = common_pb2.SamplingParams(
        min_tokens=params.min_tokens,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logit_bias=dict(params.logit_bias),
        temperature=params.temperature,
        top_p=params.top_p,
        repetition_penalty=params.repetition_penalty,
        max_tokens=params.max_tokens,
        logprobs=params.logprobs,
        typical_p=params.typical_p,
        allowed_token_ids=params.allowed_token_ids,
        bad_words=params.bad_words,
        bad_word_token_ids=[common_pb2.TokenIds(ids=ids) for ids in params.bad_word_token_ids],
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        truncate_prompt_tokens=params.truncate_prompt_tokens,
        prompt_logprobs=params.prompt_logprobs,
        speculation=params.speculation,
    )
    if params.seed is not None:
        # Random numbers use the low 64 bits, so an unsigned seed and its signed equivalent are the same.
        message.seed = params.seed - (1 << 64) if params.seed >= 1 << 63 else params.seed
    if params.constraint is not None:
        message.constraint.CopyFrom(constraint_to_wire(params.constraint))
    return message


def constraint_to_wire(constraint: Constraint) -> common_pb2.Constraint:
    """Convert a constraint to a message."""
    message = common_pb2.Constraint(after=constraint.after, frame=constraint.frame, cost_bytes=constraint.cost_bytes)
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            message.json_object = True
        case ConstraintKind.CHOICE:
            message.choice.items.extend(json.loads(constraint.source))
        case kind:
            setattr(message, kind.value, constraint.source)
    return message


def constraint_from_wire(message: common_pb2.Constraint) -> Constraint:
    """Convert a message to a constraint.

    Raises:
        InvalidRequest: no kind is set, or the constraint is too large.
    """
    name = message.WhichOneof("kind")
    if name is None or (name == "json_object" and not message.json_object):
        raise InvalidRequest("constraint has no kind; set one of its fields, or leave it out", field="constraint")
    kind = ConstraintKind(name)
    match kind:
        case ConstraintKind.JSON_OBJECT:
            source = ""
        case ConstraintKind.CHOICE:
            source = json.dumps(list(message.choice.items), ensure_ascii=False)
        case _:
            source = getattr(message, name)
    return Constraint(kind, source, message.after, message.frame, message.cost_bytes)


def sampling_from_wire(message: common_pb2.SamplingParams) -> SamplingParams:
    """Convert `message` to sampling parameters; unset fields get the defaults of `SamplingParams`.

    Raises:
        InvalidRequest: a field is out of range; the error contains its name.
    """
    # Check sizes before copying: a message of a few MiB can hold millions of items.
    for name, limit in (
        ("stop", MAX_STOP_STRINGS),
        ("stop_token_ids", MAX_STOP_TOKEN_IDS),
        ("logit_bias", MAX_LOGIT_BIAS),
        ("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS),
        ("bad_words", MAX_BAD_WORDS),
        ("bad_word_token_ids", MAX_BAD_WORD_SEQUENCES),
    ):
        count = len(getattr(message, name))
        if count > limit:
            raise InvalidRequest(f"{name} has {count} items; at most {limit} are accepted", field=name)
    longest = max((len(sequence.ids) for sequence in message.bad_word_token_ids), default=0)
    if longest > MAX_BAD_WORD_TOKENS:
        raise InvalidRequest(
            f"a sequence of bad_word_token_ids has {longest} ids; at most {MAX_BAD_WORD_TOKENS} are accepted",
            field="bad_word_token_ids",
        )
    return SamplingParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens,
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed if message.HasField("seed") else None,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        logit_bias=dict(message.logit_bias),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        constraint=constraint_from_wire(message.constraint) if message.HasField("constraint") else None,
        typical_p=message.typical_p if message.HasField("typical_p") else 1.0,
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(message.bad_words),
        bad_word_token_ids=tuple(tuple(sequence.ids) for sequence in message.bad_word_token_ids),
        include_stop_str_in_output=message.include_stop_str_in_output,
        skip_special_tokens=message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
        truncate_prompt_tokens=message.truncate_prompt_tokens if message.HasField("truncate_prompt_tokens") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        speculation=message.speculation if message.HasField("speculation") else True,
    )


def pooling_to_wire(params: PoolingParams) -> common_pb2.PoolingParams:
    """Convert the parameters of a vector to a message."""
    return common_pb2.PoolingParams(
        pooling=_POOLING_TO_WIRE[params.pooling], normalize=params.normalize, dimensions=params.dimensions or 0
    )


def pooling_from_wire(message: common_pb2.PoolingParams) -> PoolingParams:
    """Convert a message to the parameters of a vector; unset fields get their defaults.

    Raises:
        InvalidRequest: the pooling is unknown.
    """
    if message.pooling not in _POOLING_FROM_WIRE:
        raise InvalidRequest(
            f"pooling {message.pooling} is unknown; use POOLING_LAST, POOLING_MEAN or POOLING_CLS", field="pooling"
        )
    normalize = message.normalize if message.HasField("normalize") else True
    return PoolingParams(_POOLING_FROM_WIRE[message.pooling], normalize, message.dimensions or None)


def token_to_wire(token: SampledToken) -> common_pb2.Token:
    """Convert a generated token to a message."""
    message = common_pb2.Token(id=token.token_id)
    if token.logprob is not None:
        message.logprob = token.logprob
        message.top.extend(common_pb2.TokenLogprob(token_id=i, logprob=p) for i, p in token.top)
    return message


def token_from_wire(message: common_pb2.Token) -> SampledToken:
    """Convert a message to a generated token."""
    if not message.HasField("logprob"):
        return SampledToken(message.id)
    return SampledToken(message.id, message.logprob, tuple((t.token_id, t.logprob) for t in message.top))


def tokens_from_wire(messages: Iterable[common_pb2.Token]) -> tuple[SampledToken, ...]:
    """Convert messages to the generated tokens of a step."""
    return tuple(token_from_wire(message) for message in messages)


def scores_to_wire(scores: Iterable[ScoredToken] | None) -> list[common_pb2.ScoredToken]:
    """Convert the scored tokens of a prompt to messages; none if they were not requested."""
    return [
        common_pb2.ScoredToken(
            id=score.token_id,
            logprob=score.logprob,
            rank=score.rank,
            top_ids=[token for token, _ in score.top],
            top_logprobs=[logprob for _, logprob in score.top],
        )
        for score in scores or ()
    ]


def scores_from_wire(messages: Iterable[common_pb2.ScoredToken]) -> tuple[ScoredToken, ...]:
    """Convert messages to the scored tokens of a prompt."""
    return tuple(
        ScoredToken(m.id, m.logprob, m.rank, tuple(zip(m.top_ids, m.top_logprobs, strict=True))) for m in messages
    )


def finish_to_wire(reason: FinishReason | None) -> "common_pb2.FinishReason.ValueType":
    """Convert a finish reason to its enum value; `None` (not finished) becomes UNSPECIFIED.

    Raises:
        ValueError: the reason is a cancellation or an error, which is sent as a gRPC status.
    """
    if reason is None:
        return common_pb2.FINISH_REASON_UNSPECIFIED
    if reason not in _FINISH_TO_WIRE:
        raise ValueError(f"a stream that ended with {reason.value!r} must end with a status, not with a finish reason")
    return _FINISH_TO_WIRE[reason]


def finish_from_wire(value: "common_pb2.FinishReason.ValueType") -> FinishReason | None:
    """Convert an enum value to a finish reason; UNSPECIFIED (not finished) becomes `None`."""
    return _FINISH_FROM_WIRE.get(value)


def kv_reports_to_wire(reports: Iterable[KvReport]) -> list[common_pb2.KvReport]:
    """Convert reports to messages; the fields have the same names."""
    return [common_pb2.KvReport(**asdict(report)) for report in reports]


def kv_reports_from_wire(messages: Iterable[common_pb2.KvReport]) -> tuple[KvReport, ...]:
    """Convert messages to `KvReport` objects."""
    return tuple(KvReport(**{f.name: getattr(message, f.name) for f in fields(KvReport)}) for message in messages)


def token_ids_from_wire(ids: Sequence[int], field: str) -> tuple[int, ...]:
    """Convert token ids to a tuple and check their number.

    Args:
        ids: the ids of a message.
        field: name of the field, for error messages.

    Raises:
        InvalidRequest: there are more than `MAX_TOKEN_IDS` ids.
    """
    if len(ids) > MAX_TOKEN_IDS:
        raise InvalidRequest(f"{field} has {len(ids)} token ids; at most {MAX_TOKEN_IDS} are accepted", field=field)
    return tuple(ids)


def num_samples_from_wire(n: int) -> int:
    """Check `n`, the number of samples; 0 (unset) means 1.

    Raises:
        InvalidRequest: `n` is greater than `MAX_SAMPLES`.
    """
    if n > MAX_SAMPLES:
        raise InvalidRequest(f"n must be a whole number from 1 to {MAX_SAMPLES}, not {n}", field="n")
    return n or 1


def check_priority(value: int) -> int:
    """Check the priority of a request.

    Raises:
        InvalidRequest: the priority is out of range.
    """
    if abs(value) > MAX_PRIORITY:
        raise InvalidRequest(
            f"priority must be a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}, not {value}", field="priority"
        )
    return value


def check_cache_salt(value: str) -> str:
    """Check the salt of a request's cache.

    Raises:
        InvalidRequest: the salt is too long.
    """
    if len(value) > MAX_CACHE_SALT_CHARS:
        raise InvalidRequest(
            f"cache_salt has {len(value)} characters; at most {MAX_CACHE_SALT_CHARS} are accepted", field="cache_salt"
        )
    return value


def check_request_id(value: str) -> str:
    """Check that a request id is safe in log lines, headers and file names.

    Raises:
        InvalidRequest: the id is too long or has characters other than letters, digits and `-_.:`.
    """
    if not 0 < len(value) <= MAX_REQUEST_ID_CHARS or not _REQUEST_ID_CHARS.issuperset(value):
        raise InvalidRequest(
            f"a request id must have 1 to {MAX_REQUEST_ID_CHARS} letters, digits and characters from '-_.:'; this one "
            f"has {len(value)} characters",
            field="request_id",
        )
    return value
