"""Tier URLs: parsing, and secrets that never appear in errors."""

from pathlib import Path

import pytest

from kvferry.core.clock import SystemClock
from kvferry.core.errors import UsageError
from kvferry.kv.tiers import dram
from kvferry.kv.tiers.disk.disk_tier import disk_options
from kvferry.kv.tiers.interface.spec import parse_tier
from kvferry.kv.tiers.redis.options import ACL_RULE, redis_options, remedy


def test_a_redis_url() -> None:
    options = redis_options(
        parse_tier("redis://worker:p%40ss@host:7000/3?ttl=60&connections=2&prefix=a:b&encrypt=on&hedge=off")
    )
    assert options.address == ("host", 7000)
    assert (options.username, options.password, options.db) == ("worker", "p@ss", 3)
    assert (options.ttl_seconds, options.connections, options.prefix) == (60, 2, "a:b")
    assert (options.encrypt, options.hedge, options.cluster, options.is_tls) == (True, False, False, False)
    unix = redis_options(parse_tier("redis+unix:///run/redis.sock"))
    assert unix.address == ("/run/redis.sock", 0)
    tls = redis_options(parse_tier("rediss://host?cacert=/etc/ca.pem&verify=off"))
    assert (tls.address, tls.is_tls, tls.cacert, tls.verify) == (("host", 6379), True, "/etc/ca.pem", False)


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:s3cret@host:7000",
        "redis://:s3cret@host",
        "redis://u:s3cret@host:port",
        "redis://u:x@s3cret@host?nonsense",
        "redis://u:s3cret@host?ttl=soon",
        "redis://u:s3cret@host?unknown=1",
        "redis://u:s3#cret@host",
        "redis://u:s3?cret@host",
        "redis://u:s3/cret@host",
        "redis://u:s3[cret@host",
        "u:s3cret@host",
    ],
)
def test_a_password_is_never_shown(url: str) -> None:
    shown = ""
    try:
        spec = parse_tier(url)
        shown += repr(spec) + str(spec) + spec.text
        shown += repr(redis_options(spec))
    except UsageError as error:
        while error is not None:
            shown += repr(error) + str(error)
            error = error.__cause__  # type: ignore[assignment]
    assert shown
    assert "s3" not in shown
    assert "cret" not in shown


def test_a_password_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("s3cret\n")
    options = redis_options(parse_tier(f"redis://worker@host?password_file={file}"))
    assert options.password == "s3cret"
    with pytest.raises(UsageError, match="both a password"):
        redis_options(parse_tier(f"redis://worker:other@host?password_file={file}"))
    with pytest.raises(UsageError, match="cannot read"):
        redis_options(parse_tier(f"redis://worker@host?password_file={file}.not"))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host?conections=4", "use one of ttl, connections"),
        ("redis://host?connections=0", "connections='0' is not valid"),
        ("redis://host?ttl=-1", "ttl='-1'"),
        ("redis://host?prefix=a%20b", "prefix="),
        ("redis://host/name", "database number"),
        ("redis://?ttl=1", "host is missing"),
        ("redis+unix://?ttl=1", "socket is missing"),
        ("redis://user@host", "without a password"),
        ("redis://host/1?cluster=on", "only database 0"),
        ("redis+unix:///run/s?cluster=on", "no Unix socket"),
        ("redis://host?cacert=x", "need rediss://"),
        ("redis://host?verify=off", "need rediss://"),
        ("valkey://host", "use one of the schemes"),
    ],
)
def test_invalid_redis_urls_are_refused(url: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        redis_options(parse_tier(url))


def test_a_disk_url() -> None:
    options = disk_options(parse_tier("disk:///var/cache/kv?size=20GiB&direct=on&sync=on&encrypt=on"))
    assert (options.folder, options.max_bytes) == (Path("/var/cache/kv"), 20 << 30)
    assert (options.direct, options.sync, options.encrypt) == ("on", True, True)
    assert disk_options(parse_tier("disk:///t?size=1KiB")).direct == "auto"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("disk:///t", "size=20GiB"),
        ("disk:///t?size=much", "size='much'"),
        ("disk:///t?size=0", "size='0'"),
        ("disk://var/cache?size=1GiB", "three slashes"),
        ("disk:///?size=1GiB", "three slashes"),
        ("disk:///t?size=1GiB&direct=maybe", "direct='maybe'"),
        ("disk:///t?size=1GiB&fsync=on", "use one of size, direct, sync, encrypt"),
    ],
)
def test_invalid_disk_urls_are_refused(url: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        disk_options(parse_tier(url))


def test_unexpected_errors_show_only_their_code() -> None:
    assert remedy("BUSY") == "Redis answered with BUSY"


def test_invalid_urls_are_refused() -> None:
    for text in ("", "dram", "/var/cache", "://x"):
        with pytest.raises(UsageError, match="is not a tier"):
            parse_tier(text)


def test_the_documented_redis_user_is_the_one_that_errors_name() -> None:
    assert f"user worker {ACL_RULE}" in (Path(__file__).parents[5] / "docs" / "tiers.md").read_text("utf-8")


def test_an_option_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="is repeated"):
        parse_tier("dram://?size=1GiB&size=2GiB")


@pytest.mark.parametrize("url", ["dram://host?size=1MiB", "dram:///folder?size=1MiB"])
def test_a_memory_tier_with_host_or_path_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="no host"):
        dram.open_tier(parse_tier(url), object_bytes=1024, secret=b"s" * 16, clock=SystemClock())
