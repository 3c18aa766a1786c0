"""The Redis client against invalid replies, and a cluster that moves its slots."""

import logging
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from harness.servers.redis_relay import scripted
from harness.servers.redis_server import RedisServer, redis_server
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.clock import SystemClock
from kvferry.core.errors import UsageError
from kvferry.kv.tiers.interface.spec import parse_tier
from kvferry.kv.tiers.interface.tier import Presence, TierError, TierMiss
from kvferry.kv.tiers.policy.breaker import BreakerTimes
from kvferry.kv.tiers.policy.redis_slots import key_slot
from kvferry.kv.tiers.redis import redis_client, redis_tier
from kvferry.kv.tiers.redis.redis_client import ServerError, command
from kvferry.testing.tier_suite import OBJECT_BYTES, SECRET, content, get, key, put

CLOCK = SystemClock()
SECONDS = 10.0
PATIENT = BreakerTimes(failures=1000)


@contextmanager
def over(port: int, options: str = "", user: str = "") -> Iterator[redis_tier.RedisTier]:
    spec = parse_tier(f"redis://{user}127.0.0.1:{port}?hedge=off{options}")
    tier = redis_tier.open_tier(spec, object_bytes=OBJECT_BYTES, secret=SECRET, clock=CLOCK, times=PATIENT)
    try:
        yield tier
    finally:
        tier.close()


def friendly(to: bytes, says: bytes) -> Callable[[bytes], bytes]:
    """Return a server script: an empty server at the start, and afterwards `says` in answer to the command `to`."""
    started = threading.Event()

    def answer(received: bytes) -> bytes:
        if to in received and started.is_set():
            return says
        if b"PING" in received:
            return b"+PONG\r\n"
        if b"AUTH" in received:
            return b"+OK\r\n"
        if b"STRLEN" in received:
            return b":0\r\n" * received.count(b"STRLEN")
        started.set()  # the connection check at the start ends with a GET
        return b"$-1\r\n"

    return answer


ODD = [
    b"$4294967296\r\n",  # announces 4 GiB, and no byte follows
    b"$99999999999999999999999\r\n",
    b"$-7\r\nx",
    b"$1x\r\n",
    b"$\r\n",
    b"*1000000000\r\n",
    b"*-1\r\n",
    b"+OK\r\n",
    b":12\r\n",
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"x" * 10_000,
    b"\r\n",
    b"\0" * 100,
    b"-" + b"E" * 5000 + b"\r\n",
    b"-\xff\xfe\r\n",
    b"$%d\r\n" % (OBJECT_BYTES + 128),  # announces a value that never comes
    b"$%d\r\n" % (OBJECT_BYTES + 128) + bytes(OBJECT_BYTES + 128) + b"\r\n",
]


@contextmanager
def little_memory() -> Iterator[None]:
    """Check that the peak of memory allocated in the `with` block is below 2 MiB."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("says", ODD, ids=lambda says: repr(says[:24]))
def test_odd_answers_to_get_are_errors_at_once(says: bytes) -> None:
    with scripted(friendly(b"GET", says)) as port, over(port) as tier:
        into = bytearray(OBJECT_BYTES)
        started = CLOCK.monotonic()
        with little_memory(), pytest.raises(TierError):
            tier.load(key(1), [memoryview(into)], 0.3)
        assert CLOCK.monotonic() - started < 2.0
        assert not any(into)


@pytest.mark.parametrize("says", ODD[:13], ids=lambda says: repr(says[:24]))
def test_odd_answers_to_lookups_are_misses(says: bytes) -> None:
    with scripted(friendly(b"STRLEN", says)) as port, over(port) as tier:
        assert tier.lookup([key(1), key(2)], 0.3) == [Presence.NO, Presence.NO]


def test_odd_answers_to_stores_are_errors() -> None:
    with scripted(friendly(b"SET", b"*3\r\n:1\r\n:2\r\n:3\r\n")) as port, over(port) as tier:
        assert not put(tier, 1), "an array is not a success status"
    for says in (b"$4294967296\r\n", b"*1\r\n" * 2000, b"*9999999\r\n"):
        with scripted(friendly(b"SET", says)) as port, over(port) as tier, little_memory(), pytest.raises(TierError):
            tier.store(key(1), [memoryview(content(1))], 0.3)


def test_after_a_timeout_a_connection_is_not_used_again() -> None:
    """The position in the reply stream is lost, so a late reply would be taken for the next one."""
    for patient in (False, True):
        near, far = socket.socketpair()
        with far:
            wire = redis_client.Wire(near, CLOCK)
            wire.is_patient = patient
            with pytest.raises(redis_client.ReplyPending if patient else redis_client.ReplyTimeout):
                wire.reply(CLOCK.monotonic() + 0.02)
            assert wire.is_closed != patient
            wire.close()


@settings(max_examples=30, deadline=None)
@given(says=st.binary(min_size=1, max_size=200))
def test_random_bytes_raise_the_documented_error_only(says: bytes) -> None:
    with scripted(friendly(b"GET", says)) as port, over(port) as tier:
        for _ in range(2):
            with pytest.raises(TierError):
                tier.load(key(1), [memoryview(bytearray(OBJECT_BYTES))], 0.05)


def test_a_reply_that_arrives_byte_by_byte_ends_with_the_deadline() -> None:
    whole = b"$%d\r\n" % (OBJECT_BYTES + 128) + bytes(OBJECT_BYTES)
    with scripted(friendly(b"GET", whole), piece=1) as port, over(port) as tier:
        started = CLOCK.monotonic()
        with pytest.raises(TierError, match="no answer in time"):
            tier.load(key(1), [memoryview(bytearray(OBJECT_BYTES))], 0.2)
        assert 0.15 < CLOCK.monotonic() - started < 2.0


def test_a_closed_connection_is_an_error() -> None:
    with scripted(friendly(b"GET", b"")) as port, over(port) as tier, pytest.raises(TierError, match="closed"):
        get(tier, 1)


@pytest.mark.parametrize("says", [b"-ERR unknown command 's3cret'\r\n", b"-WRONGPASS s3cret\r\n", b"-s3cret\r\n"])
def test_a_password_is_in_no_error_and_no_log(says: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    def answer(received: bytes) -> bytes:
        return says

    with scripted(answer) as port, pytest.raises(UsageError) as raised, over(port, user="worker:s3cret@"):
        pass
    error: BaseException | None = raised.value
    assert error is not None
    assert "s3cret" not in repr(error) + str(error) + caplog.text
    with scripted(friendly(b"GET", b"-ERR s3cret\r\n")) as port, over(port, user="worker:s3cret@") as tier:
        with pytest.raises(TierError) as refused:
            get(tier, 1)
        assert "s3cret" not in str(refused.value) + repr(tier._options) + caplog.text


def test_keys_contain_block_names_only(caplog: pytest.LogCaptureFixture) -> None:
    """A key contains neither the tenant nor the content."""
    asked_for: list[bytes] = []
    answer = friendly(b"nothing", b"")

    def listen(received: bytes) -> bytes:
        asked_for.append(received)
        return answer(received)

    with scripted(listen) as port, over(port) as tier:
        with pytest.raises(TierMiss):
            get(tier, 1)
        tier.lookup([key(1)], SECONDS)
    sent = b"".join(asked_for)
    assert key(1).name.hex().encode() in sent
    assert key(1).tenant.encode() not in sent


def test_commands_are_written_as_redis_reads_them() -> None:
    assert command(b"GET", b"k\r\n") == b"*2\r\n$3\r\nGET\r\n$3\r\nk\r\n\r\n"
    assert ServerError("NOPERM this user").code == "NOPERM"
    assert ServerError("no code at all").code == "ERR"
    assert ServerError("").code == "ERR"


@given(st.lists(st.binary(max_size=20), max_size=6), st.integers(0, 120))
def test_the_rest_of_buffers_after_some_bytes(pieces: Sequence[bytes], count: int) -> None:
    whole = b"".join(pieces)
    assert b"".join(redis_client.after([memoryview(p) for p in pieces], count)) == whole[count:]


# ---------------------------------------------------------------------- cluster


def test_the_number_of_redirections_is_bounded() -> None:
    ports: list[int] = []

    def answer(received: bytes) -> bytes:
        if b"PING" in received:
            return b"+PONG\r\n"
        return b"-MOVED 1 127.0.0.1:%d\r\n" % ports[0]

    with scripted(answer) as port:
        ports.append(port)
        with over(port, "&cluster=on") as tier:
            with pytest.raises(TierError, match="redirected 3 times"):
                get(tier, 1)
            assert tier.lookup([key(1)], SECONDS) == [Presence.NO]


def test_without_cluster_a_redirection_names_the_setting() -> None:
    moved = friendly(b"GET", b"-MOVED 1 127.0.0.1:1\r\n")
    with scripted(moved) as port, over(port) as tier, pytest.raises(TierError, match="cluster=on"):
        get(tier, 1)


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[RedisServer, RedisServer]]:
    """A cluster of two servers with half of the slots each."""
    with (
        redis_server(cluster=True, slots=(0, 8191)) as low,
        redis_server(cluster=True, slots=(8192, 16383)) as high,
    ):
        low.ask(b"CLUSTER", b"MEET", b"127.0.0.1", b"%d" % high.port)
        pause = threading.Event()
        deadline = CLOCK.monotonic() + 30.0
        for server in (low, high):
            while b"cluster_state:ok" not in server.ask_whole(b"CLUSTER", b"INFO"):  # type: ignore[operator]
                assert CLOCK.monotonic() < deadline
                pause.wait(0.05)
        yield low, high


def slot_of(number: int) -> int:
    return key_slot(b"kv:" + key(number).name.hex().encode())


def test_objects_spread_over_a_clusters_servers(two: tuple[RedisServer, RedisServer]) -> None:
    with over(two[0].port, "&cluster=on") as tier:
        for number in range(12):
            assert put(tier, number)
        assert tier.lookup([key(n) for n in range(14)], SECONDS) == [Presence.YES] * 12 + [Presence.NO] * 2
        assert all(get(tier, n) == content(n) for n in range(12))
        for server, mine in zip(two, (range(8192), range(8192, 16384)), strict=True):
            assert server.ask(b"DBSIZE") == sum(slot_of(n) in mine for n in range(12)) > 0


def test_a_slot_that_moves_is_followed(two: tuple[RedisServer, RedisServer]) -> None:
    low, high = two
    number = next(n for n in range(100, 200) if slot_of(n) < 8192)
    slot = b"%d" % slot_of(number)
    ids = [server.ask(b"CLUSTER", b"MYID") for server in two]
    assert all(isinstance(i, bytes) for i in ids)
    low_id, high_id = (i for i in ids if isinstance(i, bytes))
    with over(low.port, "&cluster=on") as tier:
        high.ask(b"CLUSTER", b"SETSLOT", slot, b"IMPORTING", low_id)
        low.ask(b"CLUSTER", b"SETSLOT", slot, b"MIGRATING", high_id)
        assert put(tier, number), "ASK: the new owner accepts writes during the migration"
        assert get(tier, number) == content(number)
        assert not put(tier, number)
        for server in (high, low):
            server.ask(b"CLUSTER", b"SETSLOT", slot, b"NODE", high_id)
        assert get(tier, number) == content(number), "MOVED"
        assert tier.lookup([key(number)], SECONDS) == [Presence.YES]
    with over(high.port, "&cluster=on") as tier:
        assert get(tier, number) == content(number)
