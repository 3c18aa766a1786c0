"""`kvferry doctor`: machine report, transfer and compute rates, and the prompt length above which KV is loaded.

Rates are measured with the model's page and object sizes; the break-even length is computed with the workers' cost
model (`kv.pricing.price`).
"""

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from shutil import which

from kvferry.bench import bounds, transfer
from kvferry.bench.processor import processor_facts, processor_name
from kvferry.bench.sampling import alternate
from kvferry.core.clock import Clock
from kvferry.core.errors import KvferryError
from kvferry.core.ids import BlockHash, RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine.offline.llm import LLM
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.kernels import compiled
from kvferry.kv import registry
from kvferry.kv.interface.connector import ReadError
from kvferry.kv.interface.tiering import ObjectKey
from kvferry.kv.pricing.price import Piece, PriceBook
from kvferry.kv.tiers.interface.tier import Tier, TierError
from kvferry.kv.tiers.registry import open_tiers

_INSTRUCTION_SETS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "avx_vnni",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
)
_NOT_COMPILED = "not compiled, falling back to torch, several times slower; reinstall with a C++ compiler"
_COPY_BYTES = 64 << 20
_ROUNDS = 5
_TIER_SECONDS = 30.0
_MAX_TOKENS = 1 << 15
_SIZES = (1, 8, 32)
"""Numbers of storage objects per measured load; transports load pages with the same number of tokens."""


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """A line of the report."""

    name: str
    value: str
    """What a person reads."""
    data: object = None
    """What a program reads, with units in the names of numbers; `None` for `value`."""


@dataclass(frozen=True, slots=True)
class MeasuredSource:
    """Measured latency, rate and break-even prompt length of a source of KV."""

    name: str
    trip_ms: float
    gbps: float
    break_even_tokens: int | None
    """Minimum prompt length for which loading is faster than computing; `None` if it exceeds 32,768 tokens."""
    note: str = ""


def machine() -> list[DoctorFinding]:
    """Report cores, instruction sets, memory, accelerators, packages and programs of this machine."""
    info = processor_facts()
    flags = set(info.get("flags", info.get("Features", "")).split())
    sets, levels = [f for f in _INSTRUCTION_SETS if f in flags], list(compiled.levels())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [
        DoctorFinding(
            "cores",
            f"{len(os.sched_getaffinity(0))} for this process, {os.cpu_count()} in all",
            {"usable": len(os.sched_getaffinity(0)), "all": os.cpu_count()},
        ),
        DoctorFinding("processor", processor_name()),
        DoctorFinding("instructions", " ".join(sets) or "baseline only", sets),
        DoctorFinding("kernels", "compiled: " + " ".join(levels) if levels else _NOT_COMPILED, levels),
        DoctorFinding("memory", f"{memory / 2**30:.1f} GiB", {"bytes": memory}),
        DoctorFinding("gpu", _gpu()),
        DoctorFinding("nixl", _nixl()),
        DoctorFinding("redis-server", which("redis-server") or "not on the path; needed only to run a server here"),
        DoctorFinding("encryption", _package("cryptography", "kvferry[encryption]")),
    ]


def copy_rate(clock: Clock) -> DoctorFinding:
    """Measure the memory copy rate of a single thread."""
    with bounds.memory_copy(_COPY_BYTES) as copy:
        seconds = alternate({"copy": copy}, rounds=_ROUNDS, clock=clock)["copy"].median
    rate = _COPY_BYTES / seconds / 1e9
    return DoctorFinding("memory copy", f"{rate:.1f} GB/s, one thread", {"gbps": round(rate, 3), "threads": 1})


def teach_compute(llm: LLM, prices: PriceBook, clock: Clock) -> DoctorFinding:
    """Measure prefill for several prompt lengths, record the times in `prices`, and report the rates."""
    rates: dict[str, float] = {}
    for length in (32, 128, 512):
        for round_ in range(2):
            tokens = [(7 * i + 13 * length + round_) % 200 + 1 for i in range(length)]
            begun = clock.monotonic()
            _run(llm, tokens)
            seconds = clock.monotonic() - begun
        prices.observe_compute(0, length, seconds)
        rates[str(length)] = round(length / seconds, 1)
    shown = ", ".join(f"{rate:.0f} tokens/s for {length} tokens" for length, rate in rates.items())
    return DoctorFinding("prefill", shown, {"tokens_per_second": rates})


def transports(block_bytes: int, block_tokens: int, prices: PriceBook, clock: Clock) -> list[MeasuredSource]:
    """Measure every available transport between two processes on this machine.

    Args:
        block_bytes: bytes of KV per block.
        block_tokens: tokens per block.
        prices: price book that gets the measured durations.
        clock: clock of the measurement.
    """
    found: list[MeasuredSource] = []
    for name in registry.names():
        label = f"{name} (this host)"
        try:
            max_bytes = _SIZES[-1] * 4
            with transfer.pages_of_another_process(name, max_bytes, block_bytes) as (ours, peer):

                def read(count: int) -> Callable[[], None]:
                    return lambda: transfer.read_pages(ours, peer, range(count), clock)

                _teach(prices, label, {4 * size * block_bytes: read(4 * size) for size in _SIZES}, clock)
        except (KvferryError, ReadError) as error:
            found.append(MeasuredSource(label, 0.0, 0.0, None, note=f"left out: {error}"))
            continue
        found.append(_source(prices, label, block_bytes / block_tokens))
    return found


def tiers(
    urls: Sequence[str], object_bytes: int, object_tokens: int, prices: PriceBook, clock: Clock
) -> list[MeasuredSource]:
    """Measure the tiers with these URLs, using objects with random names.

    Args:
        urls: URLs of the tiers.
        object_bytes: bytes per object.
        object_tokens: tokens per object.
        prices: price book that gets the measured durations.
        clock: clock of the measurement.

    Raises:
        UsageError: a URL is invalid, or the tier cannot be reached.
    """
    found: list[MeasuredSource] = []
    for tier in open_tiers(urls, object_bytes=object_bytes, secret=secrets.token_bytes(32), clock=clock):
        try:
            keys = [ObjectKey(BlockHash(secrets.token_bytes(32)), "doctor") for _ in range(_SIZES[-1])]
            content = memoryview(secrets.token_bytes(object_bytes))
            for key in keys:
                tier.store(key, [content], _TIER_SECONDS)

            actions = {size * object_bytes: _loads(tier, keys[:size], object_bytes) for size in _SIZES}
            _teach(prices, tier.name, actions, clock)
            found.append(_source(prices, tier.name, object_bytes / object_tokens))
        except TierError as error:
            found.append(MeasuredSource(tier.name, 0.0, 0.0, None, note=f"left out: {error}"))
        finally:
            tier.close()
    return found


def _loads(tier: Tier, keys: Sequence[ObjectKey], object_bytes: int) -> Callable[[], None]:
    into = memoryview(bytearray(object_bytes))

    def load() -> None:
        for key in keys:
            tier.load(key, [into], _TIER_SECONDS)

    return load


def _teach(prices: PriceBook, label: str, actions: dict[int, Callable[[], None]], clock: Clock) -> None:
    timed = alternate({str(size): action for size, action in actions.items()}, rounds=_ROUNDS, clock=clock)
    for _ in range(3):
        for size in actions:
            prices.observe_load(label, size, timed[str(size)].median)


def _source(prices: PriceBook, label: str, token_bytes: float) -> MeasuredSource:
    def load(tokens: int) -> float:
        return prices.load_seconds([Piece(label, tokens, round(tokens * token_bytes))])

    trip, large = load(0), load(_MAX_TOKENS)
    wins = (n for n in range(1, _MAX_TOKENS) if load(n) < prices.compute_seconds(0, n))
    return MeasuredSource(
        name=label,
        trip_ms=1e3 * trip,
        gbps=_MAX_TOKENS * token_bytes / max(large - trip, 1e-9) / 1e9,
        break_even_tokens=next(wins, None),
    )


def _run(llm: LLM, tokens: list[int]) -> None:
    name = RequestId(f"doctor-{secrets.token_hex(4)}")
    llm.engine.add(EngineRequest(name, tokens, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)))
    while llm.engine.has_work:
        llm.engine.step()


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _nixl() -> str:
    found = _package("nixl-cu13", "kvferry[nixl]")
    if found.startswith("not installed"):
        return found
    import nixl_cu13._api as nixl_api

    logging.getLogger("nixl").setLevel(logging.WARNING)
    agent = nixl_api.nixl_agent("kvferry-doctor", nixl_api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    return f"{found}, backends {' '.join(sorted(agent.get_plugin_list()))}"


def _package(name: str, extra: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return f"not installed; pip install '{extra}'"
