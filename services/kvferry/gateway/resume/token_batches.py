"""Encoding of what is recorded of a stream: a header, and its tokens in batches. No I/O.

A record is a hash: `e` its epoch, `h` the header, and a field for each batch, named by the number of tokens before it.
Values are sealed with a key of their own for each record, and bound to the name of their field.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from kvferry.core.sampling import FinishReason, SampledToken
from kvferry.gateway.state.pool_seal import ValueSeal

HEADER_FIELD, EPOCH_FIELD = b"h", b"e"


class StreamHeader(msgspec.Struct, frozen=True, array_like=True, tag="stream1"):
    """What a gateway needs besides the client's request to continue its stream."""

    request_id: str
    digest: bytes
    """Digest of the request's body and prompt."""
    model: str
    """Digest of the model that generated the tokens."""
    adapter: str
    """Adapter and its version; empty for the base model."""


class TokenBatch(msgspec.Struct, frozen=True, array_like=True, tag="tokens1"):
    """Consecutive tokens of a stream."""

    token_ids: bytes
    """Token ids, 4 bytes each, little-endian."""
    logprobs: tuple[float | None, ...]
    """Log-probability of each token; empty if none has one."""
    top: tuple[tuple[tuple[int, float], ...], ...]
    """Alternatives of each token; empty if none has any."""
    num_cached: int
    num_written: int
    finish_reason: str
    """Reason why the engine ended the sequence; empty if it did not."""
    is_ended: bool
    """Whether the client was sent the whole answer."""

    @classmethod
    def of(
        cls,
        tokens: Sequence[SampledToken],
        finish: FinishReason | None = None,
        *,
        num_cached: int = 0,
        num_written: int = 0,
        is_ended: bool = False,
    ) -> "TokenBatch":
        """Encode tokens.

        Args:
            tokens: the tokens; may be empty at the end of the stream.
            finish: reason why the sequence ended with these tokens.
            num_cached: number of cached tokens of the prompt.
            num_written: number of tokens of the prompt that were computed and put in a prefix cache.
            is_ended: whether the client was sent the whole answer.
        """
        ids = array("I", [token.token_id for token in tokens])
        has_logprobs = any(token.logprob is not None for token in tokens)
        return cls(
            _little_endian(ids).tobytes(),
            tuple(token.logprob for token in tokens) if has_logprobs else (),
            tuple(token.top for token in tokens) if any(token.top for token in tokens) else (),
            num_cached,
            num_written,
            "" if finish is None else finish.value,
            is_ended,
        )

    def tokens(self) -> list[SampledToken]:
        """Return the tokens."""
        ids = array("I")
        ids.frombytes(self.token_ids)
        return [
            SampledToken(token, self.logprobs[at] if self.logprobs else None, self.top[at] if self.top else ())
            for at, token in enumerate(_little_endian(ids))
        ]


def _little_endian(ids: "array[int]") -> "array[int]":
    if array("H", [1]).tobytes()[0]:
        return ids
    swapped = ids[:]
    swapped.byteswap()
    return swapped


@dataclass(frozen=True, slots=True)
class RecordedTokens:
    """The tokens of a stream that a record has."""

    tokens: tuple[SampledToken, ...] = ()
    finish_reason: FinishReason | None = None
    is_ended: bool = False
    """Whether the whole answer was sent, so that nothing is left to generate."""
    num_cached: int = 0
    num_written: int = 0


def joined(batches: Mapping[int, TokenBatch]) -> RecordedTokens:
    """Return the tokens of batches by their first position, up to the first gap. A batch may begin inside of an earlier
    one, whose tokens it repeats: then it was written again."""
    tokens: list[SampledToken] = []
    found = RecordedTokens()
    for start, batch in sorted(batches.items()):
        if start > len(tokens):
            break
        tokens += batch.tokens()[len(tokens) - start :]
        finish = FinishReason(batch.finish_reason) if batch.finish_reason else found.finish_reason
        found = replace(found, finish_reason=finish, is_ended=found.is_ended or batch.is_ended)
        if start == 0:
            found = replace(found, num_cached=batch.num_cached, num_written=batch.num_written)
    return replace(found, tokens=tuple(tokens))


def header_of(seal: ValueSeal, fields: Mapping[bytes, bytes]) -> StreamHeader | None:
    """Return the header among a record's fields; `None` if there is none that this pool sealed for this record."""
    return seal.opened(HEADER_FIELD, fields.get(HEADER_FIELD, b""), StreamHeader)


def batches_of(seal: ValueSeal, fields: Mapping[bytes, bytes]) -> dict[int, TokenBatch]:
    """Return the batches among a record's fields by their first position, without those that do not open."""
    opened = ((name, seal.opened(name, value, TokenBatch)) for name, value in fields.items() if name.isdigit())
    return {int(name): batch for name, batch in opened if batch is not None}
