"""The gateway's map of caches: intake, memory, lookups, removal of a dropped map, and the lag of the event loop.

    make bench-cache-map                                    rows appended to tests/bench/results/cache_map.csv
    make bench-cache-map ARGS="--blocks 1000000 --dry"      a smaller map, and no rows

Times are processor time of the thread, since other processes share the machine. Events come as they do from gRPC, as
serialized `KvEvent` messages, and are parsed; the time to receive them is not included.

intake     snapshots of 64 replicas with distinct blocks, in parts of 2,000, and deltas
memory     growth of the process's resident memory
lookup     64 replicas that all have a prompt of 64 blocks (`hit`), or none of them (`miss`); with hashing of the prompt
           and with a prediction for each replica (`all`)
slice      longest time for which one slice of an event, or one step of a sweep, blocks the loop
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from harness.machine import cpu_name

from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv
from kvferry.core.clock import SystemClock
from kvferry.core.hashing import BlockNamers
from kvferry.gateway.decide.cache_map.cache_map import CacheMap
from kvferry.gateway.decide.cache_map.feed_events import xor_of
from kvferry.gateway.decide.cache_map.map_states import MapState
from kvferry.gateway.fleet.cache_feeds.event_reader import event_from_wire
from kvferry.v1 import kv_events_pb2

RESULTS = Path(__file__).parent / "results" / "cache_map.csv"
REPLICAS = 64
PART = 2000
DELTAS = (8, 128)
"""Blocks of a delta: a step of decodes, and one with a chunk of 2,048 prompt tokens."""
NUM_DELTAS = 10_000
PROMPT_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one run, a row of the CSV file."""

    date: str
    commit: str
    cpu: str
    blocks: int
    figure: str
    value: float
    unit: str


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def names_of(seed: int, number: int) -> list[bytes]:
    joined = random.Random(seed).randbytes(32 * number)
    return [joined[start : start + 32] for start in range(0, len(joined), 32)]


def message(sequence: int, count: int, xor: int) -> kv_events_pb2.KvEvent:
    return kv_events_pb2.KvEvent(
        incarnation="i", sequence=sequence, digest=kv_events_pb2.KvDigest(count=count, xor=xor.to_bytes(32, "big"))
    )


def blocks(names: list[bytes]) -> kv_events_pb2.CachedBlocks:
    return kv_events_pb2.CachedBlocks(
        names=b"".join(names), parents=b"".join([names[0]] * len(names)), depths=[5] * len(names)
    )


class Intake:
    """Applies messages and measures the time that this takes."""

    def __init__(self, cache_map: CacheMap) -> None:
        self.map = cache_map
        self.seconds = 0.0
        self.longest = 0.0

    def apply(self, address: str, data: bytes) -> None:
        began = time.thread_time()
        event = event_from_wire(kv_events_pb2.KvEvent.FromString(data))
        took = stepped(self.map.apply(address, event))
        self.seconds += time.thread_time() - began
        self.longest = max(self.longest, took)


def stepped(steps: Iterator[None]) -> float:
    """Exhaust an iterator; return the longest time of a step."""
    longest = 0.0
    while True:
        began = time.thread_time()
        try:
            next(steps)
        except StopIteration:
            return longest
        finally:
            longest = max(longest, time.thread_time() - began)


def median_us(run: Callable[[], object], times: int = 2001) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return 1e6 * sorted(taken)[times // 2]


def measure(num_blocks: int) -> list[tuple[str, float, str]]:
    """Fill a map with `num_blocks` blocks and return the figures."""
    cache_map = CacheMap(SystemClock(), max_blocks=2 * num_blocks)
    addresses = [f"10.0.0.{number}:9100" for number in range(REPLICAS)]
    prompt = [(7 * i) % 1000 for i in range(16 * PROMPT_BLOCKS + 1)]
    namers = BlockNamers(b"key")
    shared = list(namers.of("", fingerprint=b"f", block_tokens=16).chain(prompt))
    snapshots, rest = Intake(cache_map), num_blocks // REPLICAS
    before = resident_bytes()
    digests: dict[str, tuple[int, int]] = {}
    for number, address in enumerate(addresses):
        seeds = range(number * 100_000, number * 100_000 + max(1, rest // PART))
        size = min(PART, rest)
        xor = xor_of(b"".join(shared))
        for seed in seeds:
            xor ^= xor_of(b"".join(names_of(seed, size)))
        count = len(seeds) * size + len(shared)
        digests[address] = count, xor
        cache_map.join(address)
        cache_map.subscribed(address)
        for seed in seeds:
            event = message(0, count, xor)
            event.snapshot.blocks.CopyFrom(blocks(names_of(seed, size)))
            snapshots.apply(address, event.SerializeToString())
        event = message(0, count, xor)
        event.snapshot.blocks.CopyFrom(blocks(shared))
        event.snapshot.last = True
        snapshots.apply(address, event.SerializeToString())
        assert cache_map.state(address) is MapState.EXACT
    held = sum(count for count, _ in digests.values())
    memory = resident_bytes() - before
    found = [
        ("intake of snapshots", held / snapshots.seconds / 1e6, "M blocks/s"),
        ("longest slice", 1e3 * snapshots.longest, "ms"),
        ("memory", memory / 1e6, "MB"),
        ("memory per block", memory / held, "B"),
    ]
    address, sequence = addresses[0], 1
    count, xor = digests[address]
    for size in DELTAS:
        messages: list[bytes] = []
        for _ in range(NUM_DELTAS // 2):
            fresh = names_of(-sequence, size)
            for is_stored in (True, False):
                xor ^= xor_of(b"".join(fresh))
                event = message(sequence, count + size * is_stored, xor)
                if is_stored:
                    event.delta.stored.CopyFrom(blocks(fresh))
                else:
                    event.delta.removed = b"".join(fresh)
                messages.append(event.SerializeToString())
                sequence += 1
        began = time.thread_time()
        for data in messages:
            for _ in cache_map.apply(address, event_from_wire(kv_events_pb2.KvEvent.FromString(data))):
                pass
        seconds = time.thread_time() - began
        found.append((f"intake of deltas of {size}", NUM_DELTAS * size / seconds / 1e6, "M blocks/s"))
    unknown = names_of(-1, PROMPT_BLOCKS)
    found.append(("lookup, hit", median_us(lambda: cache_map.look_up(shared)), "us"))
    found.append(("lookup, miss", median_us(lambda: cache_map.look_up(unknown)), "us"))

    def everything() -> None:
        lookup = cache_map.look_up(namers.of("", fingerprint=b"f", block_tokens=16).chain(prompt))
        for one in addresses:
            lookup.of(one)

    found.append(("hashing, lookup and 64 predictions", median_us(everything), "us"))
    cache_map.leave(addresses[1])
    began = time.thread_time()
    longest = stepped(cache_map.sweep())
    found += [("sweep", time.thread_time() - began, "s"), ("longest step of a sweep", 1e3 * longest, "ms")]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--dry", action="store_true", help="append no rows")
    arguments = parser.parse_args()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    rows = [
        Row(date, commit(), cpu_name(), arguments.blocks, figure, round(value, 3), unit)
        for figure, value, unit in measure(arguments.blocks)
    ]
    for row in rows:
        print(f"{row.figure:<36}{row.value:>12.3f} {row.unit}")
    if not arguments.dry:
        append_csv(RESULTS, [asdict(row) for row in rows])


if __name__ == "__main__":
    sys.exit(main())
