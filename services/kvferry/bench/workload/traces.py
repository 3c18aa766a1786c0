"""Traces of production requests: arrival times, lengths and shared blocks, without text.

Mooncake    {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [..]}, one per line, 512 tokens per id
            (Qin et al., Mooncake, 2024, section 4)
kvferry     the same with "block_tokens": n; the ids cover prompt and output together
            (`kvferry gateway --trace-file`)
Azure       CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens (Patel et al., Splitwise, 2024, section 3)
"""

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from kvferry.bench.workload.requests import MAX_REQUESTS, BenchRequest, token_block
from kvferry.core.errors import UsageError

HASH_TOKENS = 512
_MAX_TOKENS = 1 << 20
_MAX_TIMESTAMP = 10**15
_MAX_TRACE_TOKENS = 1 << 28
"""Maximum number of tokens of all prompts and outputs; a token takes eight bytes."""
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_trace(lines: Iterable[str], *, limit: int = MAX_REQUESTS, speed: float = 1.0) -> list[BenchRequest]:
    """Read a trace in any of the three formats; times start at 0.

    Args:
        lines: lines of the file.
        limit: maximum number of requests to read.
        speed: factor by which the trace is replayed faster.

    Raises:
        UsageError: the format is unknown, a line is invalid, or the trace contains no requests; the message names the
            line.
    """
    if not speed > 0:
        raise UsageError(f"trace_speed must be above 0, not {speed}", field="trace_speed")
    iterator = iter(lines)
    first = next(iterator, "").lstrip("\ufeff")
    if first.lstrip().startswith("{"):
        requests = _mooncake(chain([first], iterator), limit)
    elif tuple(name.strip() for name in first.split(",")) == _AZURE:
        requests = _azure(iterator, limit)
    else:
        raise UsageError(
            f"the trace begins with {first.strip()[:60]!r}; expected a JSON object per line with timestamp, "
            f"input_length, output_length and hash_ids, or CSV with the header {','.join(_AZURE)}",
            field="arrivals",
        )
    if not requests:
        raise UsageError(
            "the trace contains no requests; expected at least one line in Mooncake's, kvferry's or Azure's format",
            field="arrivals",
        )
    start = min(request.at for request in requests)
    moved = [replace(r, at=(r.at - start) / speed) for r in requests]
    return sorted(moved, key=lambda request: request.at)


def _mooncake(lines: Iterable[str], limit: int) -> list[BenchRequest]:
    requests: list[BenchRequest] = []
    total = 0
    for number, line in enumerate(lines, 1):
        if len(requests) == limit:
            break
        if not line.strip():
            continue
        try:
            entry: Any = json.loads(line)
            if not isinstance(entry, dict):
                raise ValueError("it is not a JSON object")
            at, num_input, num_output = _moment(entry["timestamp"]), entry["input_length"], entry["output_length"]
            ids = entry.get("hash_ids", [])
            sizes = (_size(num_input, 1), _size(num_output, 0))
            is_own = "block_tokens" in entry
            block_tokens = _size(entry["block_tokens"], 1) if is_own else HASH_TOKENS
            if not isinstance(ids, list) or len(ids) > sum(sizes) // block_tokens + 1:
                raise ValueError("hash_ids is not a list of block ids, at most one for each block of the request")
        except (ValueError, KeyError, RecursionError) as error:
            raise _invalid(number, error) from error
        total = _total(total + sizes[0] + sizes[1] * is_own, number)
        tokens = _of_blocks(ids, block_tokens, sizes[0] + (sizes[1] if is_own else 0), number)
        requests.append(
            BenchRequest(at / 1000.0, tokens[: sizes[0]], max(1, sizes[1]), output=tokens[sizes[0] :] or None)
        )
    return requests


def _of_blocks(ids: list[object], block_tokens: int, count: int, number: int) -> tuple[int, ...]:
    """Return `count` tokens: the tokens of a block depend only on the block's id, and the tokens after the last block
    on the line's number.
    """
    tokens = tuple(chain.from_iterable(token_block(f"block {one!r}", block_tokens) for one in ids))[:count]
    return (*tokens, *token_block(f"line {number}", count - len(tokens)))


def _azure(lines: Iterator[str], limit: int) -> list[BenchRequest]:
    requests: list[BenchRequest] = []
    total = 0
    for number, line in enumerate(lines, 2):
        if len(requests) == limit:
            break
        if not line.strip():
            continue
        try:
            cells = next(csv.reader([line]))
            if len(cells) != len(_AZURE):
                raise ValueError(f"{len(cells)} cells instead of {len(_AZURE)}")
            at = _utc(cells[0])
            sizes = (_size(_digits(cells[1]), 1), _size(_digits(cells[2]), 0))
        except (ValueError, csv.Error) as error:
            raise _invalid(number, error) from error
        total = _total(total + sizes[0], number)
        requests.append(BenchRequest(at, token_block(f"line {number}", sizes[0]), max(1, sizes[1])))
    return requests


def _utc(text: str) -> float:
    """Return a date and time in seconds since the Unix epoch. Python reads six decimal places, and these traces have
    seven. A time without a time zone is read as UTC, so that clock changes of the local time zone have no effect.
    """
    whole, point, fraction = text.strip().partition(".")
    when = datetime.fromisoformat(whole + point + fraction[:6])
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def _digits(text: str) -> object:
    """Return a whole number of up to ten digits; other texts unchanged."""
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 10 else text


def _total(tokens: int, number: int) -> int:
    if tokens > _MAX_TRACE_TOKENS:
        raise UsageError(
            f"the trace has {tokens} tokens up to line {number}; at most {_MAX_TRACE_TOKENS} are read: shorten it, or "
            "set a lower number of requests",
            field="arrivals",
        )
    return tokens


def _moment(value: object) -> float:
    """Return a timestamp in milliseconds, since the trace's start or since the Unix epoch."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _MAX_TIMESTAMP:  # type: ignore[operator]
        raise ValueError(
            f"the timestamp must be in milliseconds, between 0 and {_MAX_TIMESTAMP}, not {str(value)[:40]}"
        )
    return float(value)  # type: ignore[arg-type]


def _size(value: object, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _MAX_TOKENS:
        raise ValueError(f"a length must be an integer between {low} and {_MAX_TOKENS}, not {str(value)[:40]}")
    return value


def _invalid(number: int, error: Exception) -> UsageError:
    reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)[:200]
    if "int_max_str_digits" in reason:
        reason = "a number has too many digits"
    return UsageError(f"line {number} of the trace is invalid: {reason}", field="arrivals")
