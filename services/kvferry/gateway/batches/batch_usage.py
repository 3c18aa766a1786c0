"""The tokens of a batch: the sum of the usage in its output file, whose bodies have the forms of several APIs."""

from collections.abc import Iterable

import msgspec
from msgspec import Struct

from kvferry.core.process.struct_types import describe


class BatchInputDetails(Struct, frozen=True):
    """Details of input tokens."""

    cached_tokens: int = 0


class BatchOutputDetails(Struct, frozen=True):
    """Details of output tokens."""

    reasoning_tokens: int = 0


class BatchUsage(Struct, frozen=True):
    """Tokens of the completed lines of a batch, in the fields of OpenAI's API."""

    input_tokens: int = 0
    input_tokens_details: BatchInputDetails = BatchInputDetails()
    output_tokens: int = 0
    output_tokens_details: BatchOutputDetails = BatchOutputDetails()
    total_tokens: int = 0


class _InputPart(Struct):
    cached_tokens: int | None = None


class _OutputPart(Struct):
    reasoning_tokens: int | None = None


class _Usage(Struct):
    """Usage of a chat, a completion or embeddings (first four), or of a response."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _InputPart | None = None
    completion_tokens_details: _OutputPart | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _InputPart | None = None
    output_tokens_details: _OutputPart | None = None


class _Body(Struct):
    usage: _Usage | None = None


class _Response(Struct):
    body: _Body | None = None


class _Line(Struct):
    response: _Response | None = None


describe(BatchUsage)
_lines = msgspec.json.Decoder(_Line)


def usage_of(lines: Iterable[bytes]) -> BatchUsage:
    """Return the sum of the usage of an output file's lines; a line without usage counts nothing."""
    inputs = cached = outputs = reasoning = 0
    for line in lines:
        try:
            found = _lines.decode(line)
        except (msgspec.MsgspecError, RecursionError):  # a body of another form, which has no usage
            continue
        usage = found.response and found.response.body and found.response.body.usage
        if not usage:
            continue
        inputs += usage.prompt_tokens + usage.input_tokens
        outputs += usage.completion_tokens + usage.output_tokens
        for part in (usage.prompt_tokens_details, usage.input_tokens_details):
            cached += (part and part.cached_tokens) or 0
        for detail in (usage.completion_tokens_details, usage.output_tokens_details):
            reasoning += (detail and detail.reasoning_tokens) or 0
    return BatchUsage(inputs, BatchInputDetails(cached), outputs, BatchOutputDetails(reasoning), inputs + outputs)
