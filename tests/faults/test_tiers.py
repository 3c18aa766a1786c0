"""Faults of a real redis-server and a real folder: a miss or an error in bounded time, then normal operation again."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import redis
from harness.servers.redis_relay import relay
from harness.servers.redis_server import RedisServer, redis_server
from harness.waiting import until

from kvferry.core.clock import SystemClock
from kvferry.core.errors import UsageError
from kvferry.kv.tiers.disk import disk_tier
from kvferry.kv.tiers.disk.object_file import TEMPORARY, file_bytes
from kvferry.kv.tiers.interface.spec import parse_tier
from kvferry.kv.tiers.interface.tier import ObjectKey, Presence, Tier, TierError, TierMiss
from kvferry.kv.tiers.policy.breaker import BreakerTimes
from kvferry.kv.tiers.redis import redis_tier
from kvferry.kv.tiers.redis.options import ACL_RULE
from kvferry.testing.tier_suite import OBJECT_BYTES, SECRET, content, get, key, put

SECONDS = 30.0
GRACE = 2.0
QUICK = BreakerTimes(failures=3, first_backoff_seconds=0.05, longest_backoff_seconds=0.2)
CLOCK = SystemClock()


@contextmanager
def redis_over(url: str, object_bytes: int = OBJECT_BYTES) -> Iterator[redis_tier.RedisTier]:
    tier = redis_tier.open_tier(parse_tier(url), object_bytes=object_bytes, secret=SECRET, clock=CLOCK, times=QUICK)
    try:
        yield tier
    finally:
        tier.close()


@contextmanager
def disk_over(folder: Path, options: str = "size=64MiB") -> Iterator[disk_tier.DiskTier]:
    tier = disk_tier.open_tier(
        parse_tier(f"disk://{folder}?{options}"), object_bytes=OBJECT_BYTES, secret=SECRET, clock=CLOCK
    )
    try:
        yield tier
    finally:
        tier.close()


def works(tier: Tier, number: int) -> bool:
    """Return whether an object can be stored and loaded again."""
    try:
        put(tier, number)
        return get(tier, number) == content(number)
    except TierError:
        return False


def stored_as(number: int) -> str:
    return f"kv:{key(number).name.hex()}"


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


def client_of(server: RedisServer) -> "redis.Redis[bytes]":
    return redis.Redis(unix_socket_path=str(server.socket_path))


# ---------------------------------------------------------------------- Redis


def test_redis_killed_in_the_middle_of_loads_and_back_again() -> None:
    size = 8 << 20
    name, data = ObjectKey(key(1).name, "t"), os.urandom(size)
    wrong: list[str] = []
    with redis_server() as first, redis_over(first.tcp, size) as tier:
        tier.store(name, [memoryview(data)], SECONDS)
        lost, started = threading.Event(), threading.Event()

        def load() -> None:
            while not lost.is_set():
                into = bytearray(size)
                try:
                    tier.load(name, [memoryview(into)], SECONDS)
                except TierError:
                    lost.set()
                else:
                    if into != data:
                        wrong.append("a load came back wrong")
                started.set()

        loaders = [threading.Thread(target=load) for _ in range(3)]
        for loader in loaders:
            loader.start()
        assert started.wait(SECONDS)
        first.kill()
        for loader in loaders:
            loader.join(SECONDS)
        assert lost.is_set()
        assert not wrong
        assert tier.lookup([name], 1.0) == [Presence.NO]
        with redis_server(port=first.port):
            until(lambda: tier.lookup([name], 1.0) == [Presence.NO] and store(tier, name, data), "the breaker closes")
            into = bytearray(size)
            tier.load(name, [memoryview(into)], SECONDS)
            assert into == data


def store(tier: Tier, name: ObjectKey, data: bytes) -> bool:
    try:
        return tier.store(name, [memoryview(data)], SECONDS)
    except TierError:
        return False


def test_a_frozen_redis_costs_a_few_timeouts_until_the_breaker_opens(server: RedisServer) -> None:
    with redis_over(server.tcp) as tier:
        put(tier, 1)
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            for _ in range(QUICK.failures):
                started = CLOCK.monotonic()
                with pytest.raises(TierError, match="no answer in time"):
                    tier.load(key(1), [memoryview(bytearray(OBJECT_BYTES))], 0.1)
                assert CLOCK.monotonic() - started < 0.1 + GRACE
            started = CLOCK.monotonic()
            for _ in range(200):
                assert tier.lookup([key(1)], 5.0) == [Presence.NO]
                with pytest.raises(TierError, match="did not answer recently"):
                    tier.load(key(1), [memoryview(bytearray(OBJECT_BYTES))], 5.0)
                with pytest.raises(TierError, match="did not answer recently"):
                    put(tier, 2)
            assert CLOCK.monotonic() - started < GRACE, "600 calls with a timeout of 5 s were refused at once"
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        until(lambda: works(tier, 1), "the breaker closes")


def test_requests_without_time_do_not_open_the_breaker_for_others(server: RedisServer) -> None:
    with redis_over(server.tcp) as tier:
        put(tier, 1)
        for _ in range(20):
            with pytest.raises(TierError):
                tier.load(key(1), [memoryview(bytearray(OBJECT_BYTES))], 0.0)
        assert get(tier, 1) == content(1)


def test_a_stalled_connection_is_overtaken_by_a_second_request(server: RedisServer) -> None:
    with relay(str(server.socket_path)) as between, redis_over(f"redis://127.0.0.1:{between.port}") as tier:
        put(tier, 1)
        started_at_once = threading.Barrier(3)

        def load() -> None:
            started_at_once.wait(SECONDS)
            assert all(get(tier, 1) == content(1) for _ in range(20))

        loaders = [threading.Thread(target=load) for _ in range(3)]
        for loader in loaders:
            loader.start()
        for loader in loaders:
            loader.join(SECONDS)
        get(tier, 1)
        sent, won = tier.hedges
        last = between.used_last
        assert between.num_accepted > 2, "more connections were opened than one load needs"
        between.stall(last)  # the connection returned last is used first
        started = CLOCK.monotonic()
        assert get(tier, 1) == content(1)
        assert CLOCK.monotonic() - started < SECONDS / 4
        assert tier.hedges == (sent + 1, won + 1)
        until(lambda: last in between.ended, "the reply that no call waits for was sent")
        assert get(tier, 1) == content(1), "requests and replies still match"


def test_values_changed_by_other_writers(server: RedisServer) -> None:
    with redis_over(server.tcp) as tier, client_of(server) as other:
        put(tier, 1)
        other.setrange(stored_as(1), 100_000, b"\xff\x00\xff")
        with pytest.raises(TierError, match="digest"):
            get(tier, 1)
        assert works(tier, 1)
        other.set(stored_as(1), other.get(stored_as(1))[:-5])  # type: ignore[index]
        assert tier.lookup([key(1)], SECONDS) == [Presence.NO], "a value of another length is a miss"
        with pytest.raises(TierError, match="bytes, not"):
            get(tier, 1)
        assert works(tier, 1)
        other.set(stored_as(1), b"cut")
        assert works(tier, 1), "a store replaces a value of another length"
        put(tier, 2)
        other.set(stored_as(1), other.get(stored_as(2)) or b"")
        with pytest.raises(TierError, match="belongs to a different object"):
            get(tier, 1)
        assert works(tier, 1)


def test_values_of_another_type_under_a_key(server: RedisServer) -> None:
    with redis_over(server.tcp) as tier, client_of(server) as other:
        for _ in range(2):
            other.delete(stored_as(1))
            other.rpush(stored_as(1), b"a", b"list")
            assert tier.lookup([key(1)], SECONDS) == [Presence.NO]
            with pytest.raises(TierError, match="a value of another type"):
                get(tier, 1)
            assert works(tier, 1)
        other.delete(stored_as(1))
        other.rpush(stored_as(1), b"a", b"list")
        assert works(tier, 1), "a store replaces a value of another type"


def test_values_expire_and_are_evicted() -> None:
    with redis_server(maxmemory="12mb") as server, redis_over(f"{server.tcp}?ttl=1") as tier:
        for number in range(100):
            put(tier, number)
        gone = next(n for n in range(100) if tier.lookup([key(n)], SECONDS) == [Presence.NO])
        with pytest.raises(TierMiss):
            get(tier, gone)
        until(lambda: tier.lookup([key(n) for n in range(100)], SECONDS) == [Presence.NO] * 100, "all expired")


def test_a_full_redis_without_eviction_names_the_setting() -> None:
    with redis_server(maxmemory="4mb", policy="noeviction") as server, redis_over(server.tcp) as tier:
        with pytest.raises(TierError, match="allkeys-lru"):
            [put(tier, number) for number in range(100)]
        assert get(tier, 0) == content(0), "existing objects can be loaded"
        client_of(server).flushall()
        assert works(tier, 99)


def test_users_and_passwords() -> None:
    acl = [
        "default off",
        f"worker {ACL_RULE.replace('PASSWORD', 's3cret')}",
        "reader on >s3cret ~kv:* +get +strlen +ping",
    ]
    with redis_server(acl=acl) as server:
        where = server.tcp.partition("//")[2]
        with redis_over(f"redis://worker:s3cret@{where}") as tier:
            assert works(tier, 1)
            assert put(tier, 2)
            assert tier.lookup([key(1), key(2)], SECONDS) == [Presence.YES, Presence.YES]
        with redis_over(f"redis://reader:s3cret@{where}") as tier:
            assert get(tier, 1) == content(1)
            with pytest.raises(TierError, match="ACL SETUSER"):
                put(tier, 3)
        for url, expected in [
            (f"redis://worker:wr0ng@{where}", "rejects this user and password"),
            (f"redis://{where}", "requires a password"),
            (f"redis://worker:s3cret@{where}?prefix=other", "ACL SETUSER"),
        ]:
            with pytest.raises(UsageError, match=expected) as raised, redis_over(url):
                pass
            assert "s3cret" not in str(raised.value)
            assert "wr0ng" not in str(raised.value)


def test_an_unreachable_redis_stops_the_start_and_names_the_tier() -> None:
    with redis_server() as server:
        url = server.tcp
    started = CLOCK.monotonic()
    with pytest.raises(UsageError, match=url), redis_over(url):
        pass
    with pytest.raises(UsageError, match="cannot be resolved"), redis_over("redis://nowhere.invalid:6379"):
        pass
    assert CLOCK.monotonic() - started < SECONDS


# ---------------------------------------------------------------------- disk


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[bool]:
    """Limit the disk space to `num_bytes`: by a file system of its own where mounting is permitted, else by a limit on
    the length of files.
    """
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    if os.getuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0:
        try:
            yield True
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)
        return
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (OBJECT_BYTES // 2, limits[1]))
    try:
        yield False
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def files(folder: Path) -> list[Path]:
    return [Path(root) / name for root, _, names in os.walk(folder) for name in names]


def test_a_full_disk_leaves_no_partial_file(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "small", 4 << 20) as is_mounted,
        disk_over(tmp_path / "small" / "t", "size=1GiB&direct=off") as tier,
    ):
        with pytest.raises(TierError, match=r"No space left|File too large"):
            [put(tier, number) for number in range(100)]
        written = len(files(tmp_path / "small"))
        assert written == tier.num_bytes // file_bytes(OBJECT_BYTES)
        assert all(get(tier, n) == content(n) for n in range(written))
        if is_mounted:
            for path in files(tmp_path / "small")[:4]:
                path.unlink()
            assert works(tier, 200), "there is room again"
            subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "small")], check=True)
            with pytest.raises(TierError, match="Read-only"):
                put(tier, 300)
            assert get(tier, 200) == content(200)


def test_a_folder_that_vanished_is_not_created_again(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    with disk_over(folder) as tier:
        put(tier, 1)
        shutil.rmtree(folder)
        with pytest.raises(TierMiss):
            get(tier, 1)
        with pytest.raises(TierError, match="create it again"):
            put(tier, 2)
        assert tier.lookup([key(1), key(2)], SECONDS) == [Presence.NO, Presence.NO]
        assert not folder.exists()
        folder.mkdir()
        assert works(tier, 1)


def test_a_named_pipe_or_folder_in_place_of_a_file_blocks_no_call(tmp_path: Path) -> None:
    with disk_over(tmp_path / "t", "size=64MiB&direct=off") as tier:
        put(tier, 1)
        path = files(tmp_path / "t")[0]
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(TierError):
            get(tier, 1)
        assert works(tier, 1)
        path.unlink()
        path.mkdir()
        with pytest.raises(TierError):
            get(tier, 1)


STORING = """
import sys
from kvferry.core.clock import SystemClock
from kvferry.kv.tiers.disk import disk_tier
from kvferry.kv.tiers.interface.spec import parse_tier
from kvferry.testing.tier_suite import OBJECT_BYTES, SECRET, put
tier = disk_tier.open_tier(parse_tier(sys.argv[1]), object_bytes=OBJECT_BYTES, secret=SECRET, clock=SystemClock())
print("ready", flush=True)
for number in range(int(sys.argv[2]), 1_000_000):
    put(tier, number)
"""


def stopped_in_the_middle(pid: int, folder: Path) -> bool:
    """Stop the process; continue it and return false if it has no half-written file."""
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    if any(p.name.startswith(TEMPORARY) for p in files(folder)):
        return True
    os.kill(pid, signal.SIGCONT)
    return False


def test_a_process_killed_while_it_stores_leaves_no_half_object(tmp_path: Path) -> None:
    url = f"disk://{tmp_path}/t?size=8MiB&direct=off&sync=on"
    for round_ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", STORING, url, str(1000 * round_)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        until(partial(stopped_in_the_middle, process.pid, tmp_path / "t"), "it is in the middle of a file")
        process.kill()
        process.wait(SECONDS)
        process.stdout.close()
        assert any(p.name.startswith(TEMPORARY) for p in files(tmp_path / "t"))
        with disk_over(tmp_path / "t", "size=8MiB&direct=off") as tier:
            assert not [p for p in files(tmp_path / "t") if p.name.startswith(TEMPORARY)], (
                "temporary files are removed at the start"
            )
            whole = {key(n).name.hex(): n for n in range(1000 * round_, 1000 * round_ + 1000)}
            mine = [whole[p.name] for p in files(tmp_path / "t") if p.name in whole]
            assert all(get(tier, n) == content(n) for n in mine), "each object under its final name is whole"
            assert tier.num_bytes <= 8 << 20


def test_a_live_writers_temporary_file_is_not_swept(tmp_path: Path) -> None:
    import fcntl

    with disk_over(tmp_path / "t") as tier:
        put(tier, 1)
    folder = files(tmp_path / "t")[0].parent
    alive, dead = folder / f"{TEMPORARY}alive", folder / f"{TEMPORARY}dead"
    dead.write_bytes(b"half")
    with alive.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with disk_over(tmp_path / "t"):
            assert alive.exists()
            assert not dead.exists()


def test_workers_that_share_a_folder_stay_near_its_size(tmp_path: Path) -> None:
    with disk_over(tmp_path / "t", "size=8MiB") as one, disk_over(tmp_path / "t", "size=8MiB") as other:
        for number in range(0, 200, 2):
            put(one, number)
            put(other, number + 1)
        used = sum(p.stat().st_size for p in files(tmp_path / "t"))
        assert used <= (8 << 20) + 2 * (8 << 20) // 8 + 2 * OBJECT_BYTES
        there = [n for n in range(200) if one.lookup([key(n)], SECONDS) == [Presence.YES]]
        for number in there:
            with suppress(TierMiss):  # the other worker evicted the object
                assert get(one, number) == content(number)
        assert works(one, 198)
        assert works(other, 198)
