"""Reads the load of a model server from its Prometheus page: vLLM, SGLang, and kvferry's gateways. No I/O.

Only the lines of the metrics in `FLAVORS` are read, since a page of vLLM has thousands. Values are added over a
metric's series, so that the ranks behind one port count together; shares of memory are averaged. A value that cannot be
right (negative, not a number, beyond every server's size) is left out, as if the metric were missing.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MAX_PAGE_BYTES = 4 << 20
"""Maximum size of a page; a larger one is not read."""
_MAX_SERIES = 64
"""Series of one metric that are read."""
_MAX_FINDS = 4096
"""Places of a metric's name that are looked at."""
_MAX_LINE_BYTES = 1 << 16
_MAX_VALUE = 1e15
_MAX_REQUESTS = 1e6
_MAX_BLOCKS = 1 << 28
_MAX_ADAPTERS = 1024
_LABEL = re.compile(rb'(?<!\w)(\w+)="((?:[^"\\]|\\.)*)"')
"""A label; it is tried once for each name, since every letter of a long one would make the work quadratic."""

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class MetricNames:
    """The names that one kind of model server uses; of several names, the first that the page has counts."""

    running: tuple[str, ...]
    waiting: tuple[str, ...]
    usage: tuple[str, ...] = ()
    """Share of the KV memory in use, 0 to 1."""
    memory: str = ""
    """Metric with the labels `block_tokens` and `num_blocks`."""
    block_tokens: str = ""
    num_blocks: str = ""
    adapters: str = ""
    """Metric of vLLM whose labels name the adapters in use."""
    prompt_tokens: str = ""
    """Counter of prompt tokens."""
    cached_tokens: str = ""
    """Counter of prompt tokens that were cached."""
    prefill: str = ""
    """Histogram of the seconds of prompts; its sum and count are read."""
    steps: str = ""
    """Histogram of the seconds between two tokens of an output."""
    output: str = ""
    """Histogram of the tokens of outputs."""


FLAVORS: Mapping[str, MetricNames] = {
    "vllm": MetricNames(
        running=("vllm:num_requests_running",),
        waiting=("vllm:num_requests_waiting",),
        usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        memory="vllm:cache_config_info",
        block_tokens="block_size",
        num_blocks="num_gpu_blocks",
        adapters="vllm:lora_requests_info",
        prompt_tokens="vllm:prompt_tokens_total",
        cached_tokens="vllm:prefix_cache_hits_total",
        prefill="vllm:request_prefill_time_seconds",
        steps="vllm:inter_token_latency_seconds",
        output="vllm:request_generation_tokens",
    ),
    "sglang": MetricNames(
        running=("sglang:num_running_reqs",),
        waiting=("sglang:num_queue_reqs",),
        usage=("sglang:token_usage",),
        memory="sglang:cache_config_info",
        block_tokens="page_size",
        num_blocks="num_pages",
        prompt_tokens="sglang:prompt_tokens_total",
        cached_tokens="sglang:cached_tokens_total",
        steps="sglang:inter_token_latency_seconds",
    ),
    "kvferry": MetricNames(
        running=("kvferry_gateway_streams_open",),
        waiting=("kvferry_gateway_queued_requests",),
        prompt_tokens="kvferry_gateway_prompt_tokens_total",
        cached_tokens="kvferry_gateway_cached_tokens_total",
        steps="kvferry_gateway_inter_token_seconds",
    ),
}
"""Metrics by kind of model server."""
_RUNNING = {name: names.running[0].encode() for name, names in FLAVORS.items()}


@dataclass(frozen=True, slots=True)
class SumCount:
    """Sum and count of a histogram, or a counter's value twice."""

    total: float = 0.0
    count: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What one page says."""

    flavor: str
    running: int = 0
    waiting: int = 0
    usage: float | None = None
    """Share of the KV memory in use; `None` if the page does not say."""
    block_tokens: int = 0
    num_blocks: int = 0
    """0 if unknown."""
    adapters: frozenset[str] = frozenset()
    """Adapters with running or waiting requests."""
    max_adapters: int = 0
    """Adapters that run at a time; 0 if unknown."""
    prompt_tokens: float | None = None
    cached_tokens: float | None = None
    prefill: SumCount | None = None
    steps: SumCount | None = None
    output: SumCount | None = None


def read_page(page: bytes, flavor: str = AUTO) -> EngineLoad | None:
    """Return the load on a page; `None` if it has no metric of the model server's running requests.

    Args:
        page: text in Prometheus' format, at most `MAX_PAGE_BYTES` are read.
        flavor: kind of model server, a name of `FLAVORS`, or `auto`.
    """
    page = page[:MAX_PAGE_BYTES]
    if flavor == AUTO:
        flavor = next((name for name, metric in _RUNNING.items() if metric in page), "")
        if not flavor:
            return None
    names = FLAVORS[flavor]
    running = _requests(page, names.running)
    if running is None:
        return None
    labels = next((labels for labels, _ in _series(page, names.memory)), {})
    adapters = _adapters(page, names.adapters)
    return EngineLoad(
        flavor=flavor,
        running=running,
        waiting=_requests(page, names.waiting) or 0,
        usage=_usage(page, names.usage),
        block_tokens=_whole(labels.get(names.block_tokens, ""), 1 << 20),
        num_blocks=_whole(labels.get(names.num_blocks, ""), _MAX_BLOCKS),
        adapters=adapters[0],
        max_adapters=adapters[1],
        prompt_tokens=_counter(page, names.prompt_tokens),
        cached_tokens=_counter(page, names.cached_tokens),
        prefill=_histogram(page, names.prefill),
        steps=_histogram(page, names.steps),
        output=_histogram(page, names.output),
    )


def _series(page: bytes, name: str) -> Iterator[tuple[Mapping[str, str], float]]:
    """Yield labels and value of each series of a metric, at most `_MAX_SERIES`."""
    wanted, position, found = name.encode(), 0, 0
    for _ in range(_MAX_FINDS if name else 0):
        position = page.find(wanted, position)
        if position < 0 or found == _MAX_SERIES:
            return
        end = page.find(b"\n", position)
        end = len(page) if end < 0 else end
        is_line = position == 0 or page[position - 1 : position] == b"\n"
        rest = page[position + len(wanted) : end]
        position = end
        if not is_line or rest[:1] not in (b" ", b"{") or len(rest) > _MAX_LINE_BYTES:
            continue
        close = rest.rfind(b"}") if rest[:1] == b"{" else -1
        words = rest[close + 1 :].split(maxsplit=2)
        try:
            value = float(words[0])
        except (ValueError, IndexError):
            continue
        found += 1
        labels = rest[: close + 1]
        yield {key.decode(): text.decode("utf-8", "replace") for key, text in _LABEL.findall(labels)}, value


def _values(page: bytes, name: str) -> list[float]:
    return [value for _, value in _series(page, name) if 0 <= value <= _MAX_VALUE]


def _requests(page: bytes, names: tuple[str, ...]) -> int | None:
    for name in names:
        values = [value for value in _values(page, name) if value <= _MAX_REQUESTS]
        if values:
            return int(sum(values))
    return None


def _usage(page: bytes, names: tuple[str, ...]) -> float | None:
    for name in names:
        values = [value for value in _values(page, name) if value <= 1.0]
        if values:
            return sum(values) / len(values)
    return None


def _counter(page: bytes, name: str) -> float | None:
    values = _values(page, name)
    return sum(values) if values else None


def _histogram(page: bytes, name: str) -> SumCount | None:
    total, count = _counter(page, f"{name}_sum") if name else None, _counter(page, f"{name}_count") if name else None
    return None if total is None or count is None else SumCount(total, count)


def _whole(text: str, most: int) -> int:
    return int(text) if text.isdecimal() and len(text) < 12 and int(text) <= most else 0


def _adapters(page: bytes, name: str) -> tuple[frozenset[str], int]:
    """Return the adapters of the newest series, whose value is the time of its last change."""
    newest: Mapping[str, str] = {}
    latest = -1.0
    for labels, value in _series(page, name):
        if math.isfinite(value) and value >= latest:
            newest, latest = labels, value
    listed = ",".join((newest.get("running_lora_adapters", ""), newest.get("waiting_lora_adapters", "")))
    adapters = frozenset(part.strip() for part in listed.split(",", _MAX_ADAPTERS) if part.strip())
    return adapters, _whole(newest.get("max_lora", ""), _MAX_ADAPTERS)
