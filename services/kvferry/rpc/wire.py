"""Domain words to `kvferry.v1` messages and back; sizes are bounded here, meanings by whoever knows them."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import cast

from kvferry.core.errors import InvalidRequest
from kvferry.core.sampling import FinishReason, SampledToken, SamplingParams
from kvferry.rpc.token_source import KvReport
from kvferry.v1 import common_pb2, decode_pb2

MAX_TOKEN_IDS = 1 << 20
"""Token ids in one message at most; far beyond any context served."""
MAX_SAMPLES = 64
"""Samples (`n`) of one prompt at most."""
MAX_REQUEST_ID_CHARS = 128
_REQUEST_ID_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:")

_FINISH_TO_WIRE = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_FINISH_FROM_WIRE = {wire: reason for reason, wire in _FINISH_TO_WIRE.items()}


def sampling_to_wire(params: SamplingParams) -> common_pb2.SamplingParams:
    """`params` as a message; a field at its default is left out."""
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
    )
    if params.seed is not None:
        # Random numbers use the low 64 bits, so a large unsigned seed and its signed twin are the same.
        message.seed = params.seed - (1 << 64) if params.seed >= 1 << 63 else params.seed
    return message


def sampling_from_wire(message: common_pb2.SamplingParams) -> SamplingParams:
    """The wishes in `message`; what is not set has the default of `SamplingParams`.

    Raises:
        InvalidRequest: naming the field that is out of bounds.
    """
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
    )


def token_to_wire(token: SampledToken) -> common_pb2.Token:
    """One generated token."""
    message = common_pb2.Token(id=token.token_id)
    if token.logprob is not None:
        message.logprob = token.logprob
        message.top.extend(common_pb2.TokenLogprob(token_id=i, logprob=p) for i, p in token.top)
    return message


def token_from_wire(message: common_pb2.Token) -> SampledToken:
    """One generated token."""
    if not message.HasField("logprob"):
        return SampledToken(message.id)
    return SampledToken(message.id, message.logprob, tuple((t.token_id, t.logprob) for t in message.top))


def tokens_from_wire(messages: Iterable[common_pb2.Token]) -> tuple[SampledToken, ...]:
    """All tokens of one step."""
    return tuple(token_from_wire(message) for message in messages)


def finish_to_wire(reason: FinishReason | None) -> "common_pb2.FinishReason.ValueType":
    """`None` (not finished) is UNSPECIFIED.

    Raises:
        ValueError: cancellations and errors travel as a status, never as a finish reason.
    """
    if reason is None:
        return common_pb2.FINISH_REASON_UNSPECIFIED
    if reason not in _FINISH_TO_WIRE:
        raise ValueError(f"a stream that ended with {reason.value!r} ends with a status, not with a finish reason")
    return _FINISH_TO_WIRE[reason]


def finish_from_wire(value: "common_pb2.FinishReason.ValueType") -> FinishReason | None:
    """`None` while the sequence goes on."""
    return _FINISH_FROM_WIRE.get(value)


def handoff_outcome_from_wire(value: int) -> str:
    """`none`, `fetched`, `local`, `recomputed` or `tier`; `none` too for what this version does not know."""
    names = decode_pb2.Handoff.Outcome
    known = value in names.values() and value != decode_pb2.Handoff.OUTCOME_UNSPECIFIED
    return names.Name(cast("decode_pb2.Handoff.Outcome.ValueType", value)).lower()[8:] if known else "none"


def kv_reports_to_wire(reports: Iterable[KvReport]) -> list[common_pb2.KvReport]:
    """Reports as messages; the fields have the same names."""
    return [common_pb2.KvReport(**asdict(report)) for report in reports]


def kv_reports_from_wire(messages: Iterable[common_pb2.KvReport]) -> tuple[KvReport, ...]:
    """Messages as reports."""
    return tuple(KvReport(**{f.name: getattr(message, f.name) for f in fields(KvReport)}) for message in messages)


def token_ids_from_wire(ids: Sequence[int], field: str) -> tuple[int, ...]:
    """The ids as a tuple.

    Raises:
        InvalidRequest: there are more than `MAX_TOKEN_IDS`.
    """
    if len(ids) > MAX_TOKEN_IDS:
        raise InvalidRequest(f"{field} has {len(ids)} token ids; at most {MAX_TOKEN_IDS} are accepted", field=field)
    return tuple(ids)


def num_samples_from_wire(n: int) -> int:
    """`n`, where 0 means 1.

    Raises:
        InvalidRequest: more than `MAX_SAMPLES`.
    """
    if n > MAX_SAMPLES:
        raise InvalidRequest(f"n must be a whole number from 1 to {MAX_SAMPLES}, not {n}", field="n")
    return n or 1


def check_request_id(value: str) -> str:
    """A request id that is safe in a log line, a header and a file name.

    Raises:
        InvalidRequest: it is too long or has other characters than letters, digits and `-_.:`.
    """
    if not 0 < len(value) <= MAX_REQUEST_ID_CHARS or not _REQUEST_ID_CHARS.issuperset(value):
        raise InvalidRequest(
            f"a request id has 1 to {MAX_REQUEST_ID_CHARS} letters, digits and characters of '-_.:'; "
            f"this one has {len(value)} characters",
            field="request_id",
        )
    return value
