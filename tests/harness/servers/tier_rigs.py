"""Rigs for `tier_suite`: each tier opened from its URL, with real storage."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from harness.servers.redis_server import RedisServer, redis_server
from kvferry.core.clock import SystemClock
from kvferry.kv.tiers import dram
from kvferry.kv.tiers.disk import disk_tier
from kvferry.kv.tiers.disk.object_file import ALIGNMENT, file_bytes
from kvferry.kv.tiers.interface.frame import HEADER_BYTES
from kvferry.kv.tiers.interface.spec import parse_tier
from kvferry.kv.tiers.interface.tier import ObjectKey
from kvferry.kv.tiers.redis import redis_tier
from kvferry.testing.tier_suite import OBJECT_BYTES, SECRET, Raw, TierRig, closing

NUM_FIT = 8
_STRANGER = b"a secret of somebody else"
_REDIS_BYTES = 24 << 20
"""`maxmemory` of Redis in bytes; several times the memory of an empty server with its connections."""


@contextmanager
def dram_rig() -> Iterator[TierRig]:
    """Yield a rig with a DRAM tier, which is not persistent."""
    spec = parse_tier(f"dram://?size={NUM_FIT * OBJECT_BYTES}")
    tier = dram.open_tier(spec, object_bytes=OBJECT_BYTES, secret=SECRET, clock=SystemClock())
    with closing(TierRig(tier, NUM_FIT)) as rig:
        yield rig


@contextmanager
def disk_rig(folder: Path, options: str = "") -> Iterator[TierRig]:
    """Yield a rig with a disk tier in `folder`."""

    def opened(secret: bytes = SECRET) -> disk_tier.DiskTier:
        spec = parse_tier(f"disk://{folder}/tier?size={NUM_FIT * file_bytes(OBJECT_BYTES)}{options}")
        return disk_tier.open_tier(spec, object_bytes=OBJECT_BYTES, secret=secret, clock=SystemClock())

    def path(key: ObjectKey) -> Path:
        text = key.name.hex()
        return folder / "tier" / text[:2] / text[2:4] / text

    def write(key: ObjectKey, stored: bytes) -> None:
        path(key).write_bytes(stored)

    raw = Raw(lambda key: path(key).read_bytes(), write, frame_at=0, pages_at=ALIGNMENT)
    with closing(TierRig(opened(), NUM_FIT, opened, raw, lambda: opened(_STRANGER))) as rig:
        yield rig


class Servers:
    """Redis servers, each started when first used and running until the end of the tests."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._running: dict[str, RedisServer] = {}

    def find(self, kind: str) -> RedisServer:
        """Return the server of this kind (`plain`, `tls`, `cluster`) after removing all its keys."""
        server = self._running.get(kind)
        if server is None:
            made = redis_server(maxmemory=str(_REDIS_BYTES), tls=kind == "tls", cluster=kind == "cluster")
            server = self._running[kind] = self._stack.enter_context(made)
        server.ask(b"FLUSHALL")
        return server


@contextmanager
def redis_rig(server: RedisServer, url: str, options: str = "") -> Iterator[TierRig]:
    """Yield a rig with a Redis tier on the empty `server`, opened from `url`."""
    cacert = f"&cacert={server.cacert}" if url.startswith("rediss:") else ""

    def opened(secret: bytes = SECRET) -> redis_tier.RedisTier:
        spec = parse_tier(f"{url}?ttl=600{options}{cacert}")
        return redis_tier.open_tier(spec, object_bytes=OBJECT_BYTES, secret=secret, clock=SystemClock())

    def read(key: ObjectKey) -> bytes:
        found = server.ask_whole(b"GET", f"kv:{key.name.hex()}".encode())
        assert found is not None
        return found

    def write(key: ObjectKey, stored: bytes) -> None:
        server.ask(b"SET", f"kv:{key.name.hex()}".encode(), stored)

    raw = Raw(read, write, frame_at=0, pages_at=HEADER_BYTES)
    num_fit = _REDIS_BYTES // OBJECT_BYTES  # upper bound: Redis also counts data in flight
    with closing(TierRig(opened(), num_fit, opened, raw, lambda: opened(_STRANGER), is_exact_lru=False)) as rig:
        yield rig


def rigs(folder: Path, servers: Servers) -> dict[str, Callable[[], AbstractContextManager[TierRig]]]:
    """Return the rigs of all tiers that store frames, by name."""

    def over_redis(kind: str, url: Callable[[RedisServer], str], options: str = "") -> AbstractContextManager[TierRig]:
        server = servers.find(kind)
        return redis_rig(server, url(server), options)

    return {
        "disk": lambda: disk_rig(folder),
        "disk-direct": lambda: disk_rig(folder, "&direct=on"),
        "disk-sync": lambda: disk_rig(folder, "&sync=on&direct=off"),
        "disk-sealed": lambda: disk_rig(folder, "&encrypt=on"),
        "redis-tcp": lambda: over_redis("plain", lambda server: server.tcp),
        "redis-unix": lambda: over_redis("plain", lambda server: server.unix),
        "redis-sealed": lambda: over_redis("plain", lambda server: server.unix, "&encrypt=on"),
        "redis-tls": lambda: over_redis("tls", lambda server: server.tcp),
        "redis-cluster": lambda: over_redis("cluster", lambda server: server.tcp, "&cluster=on"),
    }


RIGS = tuple(rigs(Path(), Servers(ExitStack())))
"""Names of the rigs of all tiers that store frames."""
