"""Throughput of tiers: objects read from and written to Redis and disk, compared with their bounds.

    make bench-tiers                        rows appended to tests/bench/results/tiers.csv
    make bench-tiers ARGS="--quick --sizes 1024"

Redis, one connection, one thread, the same server and values for all, over TCP and over a Unix socket:

    tier        the tier's `load`: straight into the buffers, verified         no check    the same, unverified
    redis-py    `get` of redis-py with hiredis, which gives a new `bytes`      socket      bare `recv_into` of the same
                copied: and copied to where it belongs, unverified

Disk: `load` and `store` through the page cache (warm), with the cache dropped before each read (cold), and past it
(direct). The systems take turns within each repetition, so that a change in the machine's speed affects all of them.
Every pass moves the same 64 MiB of distinct objects to and from new places in memory, as a tier of a worker does.
"""

import argparse
import mmap
import os
import secrets
import shutil
import socket
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import redis
from harness.machine import cpu_name
from harness.servers.redis_server import redis_server

from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv
from kvferry.core.clock import SystemClock
from kvferry.core.ids import BlockHash
from kvferry.kv.tiers.disk import disk_tier
from kvferry.kv.tiers.interface.frame import Frames, Opening
from kvferry.kv.tiers.interface.spec import parse_tier
from kvferry.kv.tiers.interface.tier import ObjectKey
from kvferry.kv.tiers.redis import redis_tier

RESULTS = Path(__file__).parent / "results" / "tiers.csv"
SECRET = b"a secret for the benchmark"
PASS_BYTES = 64 << 20
SECONDS = 60.0
CLOCK = SystemClock()
TURNS = 4
SIZES_KIB = (256, 1024, 1536, 4096)


@dataclass(frozen=True, slots=True)
class Row:
    """One cell of one run, a row of the CSV file."""

    date: str
    commit: str
    cpu: str
    place: str
    cell: str
    system: str
    object_kib: int
    median: float
    min: float
    max: float
    n: int
    unit: str
    load_average: float


class Objects:
    """Keys and contents of one pass, and memory to receive them."""

    def __init__(self, object_bytes: int) -> None:
        self.object_bytes = object_bytes
        self.count = max(1, PASS_BYTES // object_bytes)
        size = self.count * object_bytes
        self.source = memoryview(mmap.mmap(-1, size))
        self.target = memoryview(mmap.mmap(-1, size))
        for at in range(0, size, 1 << 20):
            self.source[at : at + (1 << 20)] = os.urandom(min(1 << 20, size - at))
            self.target[at : at + (1 << 20)] = bytes(min(1 << 20, size - at))
        self.keys = [ObjectKey(BlockHash(secrets.token_bytes(32)), "tenant") for _ in range(self.count)]

    def part(self, whole: memoryview, i: int) -> memoryview:
        return whole[i * self.object_bytes : (i + 1) * self.object_bytes]

    def check(self) -> None:
        """Check that the received bytes are those that were sent."""
        assert self.target == self.source
        self.target[:] = bytes(len(self.target))


class _Unchecked(Opening):
    def feed(self, arrived: memoryview) -> None:
        pass

    def finish(self) -> None:
        pass


class _TrustingFrames(Frames):
    """Frames whose pages are not read."""

    def open(self, header: bytes, key: ObjectKey) -> Opening:
        super().open(header, key)
        return _Unchecked(b"", None, None)


def timed(objects: Objects, action: Callable[[int], object], which: range) -> float:
    """Return the rate over some of the objects in GB/s."""
    started = CLOCK.monotonic()
    for i in which:
        action(i)
    return len(which) * objects.object_bytes / (CLOCK.monotonic() - started) / 1e9


def take_turns(
    objects: Objects,
    systems: dict[str, Callable[[int], object]],
    repetitions: int,
    before: Callable[[str, range], object] = lambda name, which: None,
) -> dict[str, list[float]]:
    """Return rates by system; the first repetition warms up. A turn is a quarter of the objects, and short.

    Args:
        before: function to call before each turn; its time does not count.
    """
    rates: dict[str, list[float]] = {name: [] for name in systems}
    quarter = -(-objects.count // TURNS)
    for repetition in range(repetitions + 1):
        for start in range(0, objects.count, quarter):
            which = range(start, min(objects.count, start + quarter))
            for name, action in systems.items():
                before(name, which)
                rate = timed(objects, action, which)
                if repetition:
                    rates[name].append(rate)
    return rates


def share(ours: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the ratios ours / others by turn; both sides of a ratio were measured at about the same
    time."""
    return statistics.median(a / b for a, b in zip(ours, others, strict=True))


def redis_over(url: str, frames: Frames) -> redis_tier.RedisTier:
    tier = redis_tier.RedisTier(redis_tier.redis_options(parse_tier(f"{url}?connections=1&hedge=off")), frames, CLOCK)
    tier.start()
    return tier


def raw_socket(url: str) -> socket.socket:
    parts = urlsplit(url)
    if parts.scheme == "redis+unix":
        made = socket.socket(socket.AF_UNIX)
        made.connect(parts.path)
        return made
    return socket.create_connection((parts.hostname, parts.port))


def bench_redis(object_bytes: int, repetitions: int) -> dict[tuple[str, str, str], list[float]]:
    objects = Objects(object_bytes)
    names = [b"kv:" + key.name.hex().encode() for key in objects.keys]
    found: dict[tuple[str, str, str], list[float]] = {}
    with redis_server(maxmemory="2gb") as server, ExitStack() as stack:
        for place, url in (("redis, TCP", server.tcp), ("redis, Unix socket", server.unix)):
            tier = redis_over(url, Frames(SECRET, object_bytes))
            trusting = redis_over(url, _TrustingFrames(SECRET, object_bytes))
            sealing = redis_over(url, Frames(SECRET, object_bytes, encrypt=True))
            for opened in (tier, trusting, sealing):
                stack.callback(opened.close)
            client = redis.Redis(unix_socket_path=urlsplit(url).path) if "unix" in url else redis.Redis.from_url(url)
            stack.callback(client.close)
            raw = stack.enter_context(raw_socket(url))
            scratch = memoryview(bytearray(4096))

            def load(i: int, which: redis_tier.RedisTier = tier) -> None:
                which.load(objects.keys[i], [objects.part(objects.target, i)], SECONDS)

            def load_unchecked(i: int, which: redis_tier.RedisTier = trusting) -> None:
                which.load(objects.keys[i], [objects.part(objects.target, i)], SECONDS)

            def load_sealed(i: int, which: redis_tier.RedisTier = sealing) -> None:
                which.load(objects.keys[i], [objects.part(objects.target, i)], SECONDS)

            def get(i: int, client: "redis.Redis[bytes]" = client) -> None:
                assert len(client.get(names[i]) or b"") > object_bytes

            def receive(i: int, raw: socket.socket = raw, scratch: memoryview = scratch) -> None:
                raw.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(names[i]), names[i]))
                head = b"$%d\r\n" % (object_bytes + 128)
                left = len(head) + 128
                while left:
                    left -= raw.recv_into(scratch, left)
                into = objects.part(objects.target, i)
                while len(into):
                    into = into[raw.recv_into(into) :]
                left = 2
                while left:
                    left -= raw.recv_into(scratch, left)

            def store(i: int, which: redis_tier.RedisTier = tier) -> None:
                assert which.store(objects.keys[i], [objects.part(objects.source, i)], SECONDS)

            def set_(i: int, client: "redis.Redis[bytes]" = client) -> None:
                client.set(names[i], objects.part(objects.source, i), ex=3600)

            def copy(i: int, client: "redis.Redis[bytes]" = client) -> None:
                objects.part(objects.target, i)[:] = memoryview(client.get(names[i]) or b"")[128:]

            def empty(_name: str, _which: range, client: "redis.Redis[bytes]" = client) -> None:
                client.flushall()

            for name, rates in take_turns(objects, {"tier": store, "redis-py": set_}, repetitions, empty).items():
                found[place, "write", name] = rates
            client.flushall()
            for i in range(objects.count):
                store(i)
            load(0)
            reading = {
                "tier": load,
                "redis-py": get,
                "redis-py, copied": copy,
                "socket": receive,
                "no check": load_unchecked,
            }
            for name, rates in take_turns(objects, reading, repetitions).items():
                found[place, "read", name] = rates
            objects.target[:] = bytes(len(objects.target))
            timed(objects, load, range(objects.count))
            objects.check()
            client.flushall()
            for i in range(objects.count):
                sealing.store(objects.keys[i], [objects.part(objects.source, i)], SECONDS)
            found[place, "read", "sealed"] = take_turns(objects, {"sealed": load_sealed}, repetitions)["sealed"]
            client.flushall()
    return found


def bench_disk(object_bytes: int, repetitions: int, parent: Path | None) -> dict[tuple[str, str, str], list[float]]:
    objects = Objects(object_bytes)
    folder = Path(tempfile.mkdtemp(dir=parent, prefix="kv-bench-"))

    def opened(direct: str) -> disk_tier.DiskTier:
        spec = parse_tier(f"disk://{folder}/{direct}?size=1GiB&direct={direct}")
        return disk_tier.open_tier(spec, object_bytes=object_bytes, secret=SECRET, clock=CLOCK)

    folders = {"page cache": "off", "cold": "off", "direct": "on"}

    def path(name: str, i: int) -> Path:
        text = objects.keys[i].name.hex()
        return folder / folders[name] / text[:2] / text[2:4] / text

    def remove(name: str, which: range) -> None:
        for i in which:
            path(name, i).unlink(missing_ok=True)

    def make_cold_or_warm(name: str, which: range) -> None:
        for i in which:
            if name == "page cache":
                path(name, i).read_bytes()
            elif name == "cold":
                fd = os.open(path(name, i), os.O_RDONLY)
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)

    try:
        through = opened("off")
        tiers = {"page cache": through}
        with suppress(Exception):
            tiers["direct"] = opened("on")

        def storing(tier: disk_tier.DiskTier) -> Callable[[int], object]:
            return lambda i: tier.store(objects.keys[i], [objects.part(objects.source, i)], SECONDS)

        def loading(tier: disk_tier.DiskTier) -> Callable[[int], object]:
            return lambda i: tier.load(objects.keys[i], [objects.part(objects.target, i)], SECONDS)

        found = {}
        writing = {name: storing(tier) for name, tier in tiers.items()}
        for name, rates in take_turns(objects, writing, repetitions, remove).items():
            found["disk", "write", name] = rates
        reading = {name: loading(tier) for name, tier in tiers.items()} | {"cold": loading(through)}
        for name, rates in take_turns(objects, reading, repetitions, make_cold_or_warm).items():
            found["disk", "read", name] = rates
        objects.check()
        return found
    finally:
        shutil.rmtree(folder)


def shares(found: dict[tuple[str, str, str], list[float]]) -> dict[tuple[str, str, str], float]:
    """Return the shares of the bounds that the tier reaches."""
    return {
        (place, cell, f"tier / {other}"): share(found[place, cell, "tier"], rates)
        for (place, cell, other), rates in found.items()
        if (place, cell, "tier") in found and other not in ("tier", "sealed")
    }


def table(rows: Sequence[Row]) -> str:
    """Return a table with a column per size and a row per place, cell and system: median (least to most), GB/s."""
    sizes = sorted({r.object_kib for r in rows})
    lines = [f"{'GB/s':<46}" + "".join(f"{f'{size} KiB':>24}" for size in sizes)]
    by_cell = {(r.place, r.cell, r.system, r.object_kib): r for r in rows}
    for place, cell, system in dict.fromkeys((r.place, r.cell, r.system) for r in rows):
        found = [by_cell[place, cell, system, size] for size in sizes]
        shown = "".join(
            f"{f'{r.median:.2f} ({r.min:.2f} to {r.max:.2f})' if r.unit == 'GB/s' else f'{r.median:.2f}':>24}"
            for r in found
        )
        lines.append(f"{f'{place}, {cell}, {system}':<46}{shown}")
    lines.append(f"\n{rows[0].cpu}, commit {rows[0].commit}, load average {rows[0].load_average}; n = {rows[0].n}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="2 repetitions")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument(
        "--sizes", default=",".join(map(str, SIZES_KIB)), help="object sizes in KiB, comma-separated; %(default)s"
    )
    parser.add_argument("--places", default="redis,disk", help="%(default)s")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure; default: that of temporary files")
    parser.add_argument("--csv", type=Path, default=RESULTS, metavar="FILE", help="CSV file to which rows are appended")
    given = parser.parse_args()
    repetitions = 2 if given.quick else given.repetitions
    date, at_commit, cpu = datetime.now(UTC).isoformat(timespec="seconds"), commit(), cpu_name()
    load = round(os.getloadavg()[0], 2)
    rows = []
    for kib in map(int, given.sizes.split(",")):
        found = bench_redis(kib << 10, repetitions) if "redis" in given.places else {}
        found |= bench_disk(kib << 10, repetitions, given.folder) if "disk" in given.places else {}
        for (place, cell, system), rates in found.items():
            middle, low, high = (round(f(rates), 3) for f in (statistics.median, min, max))
            cells = (place, cell, system, kib, middle, low, high, len(rates), "GB/s")
            rows.append(Row(date, at_commit, cpu, *cells, load))
        for (place, cell, system), ratio in shares(found).items():
            middle = round(ratio, 3)
            n = len(found[place, cell, "tier"])
            rows.append(Row(date, at_commit, cpu, place, cell, system, kib, middle, middle, middle, n, "ratio", load))
    append_csv(given.csv, [asdict(r) for r in rows])
    print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
