"""Options in the URL of a Redis tier, and remedies for error codes of the server."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.core.errors import UsageError
from kvferry.core.process.config import read_secret_file
from kvferry.core.settings.parsers import boolean, whole
from kvferry.kv.tiers.interface.spec import TierSpec
from kvferry.kv.tiers.policy.redis_slots import Address

DEFAULT_PORT = 6379
ACL_RULE = "on >PASSWORD resetkeys ~kv:* resetchannels -@all +get +set +strlen +unlink +ping"
_OPTIONS = (
    "ttl", "connections", "prefix", "cluster", "password_file", "cacert", "verify", "encrypt", "hedge",
)  # fmt: skip
_SCHEMES = ("redis", "rediss", "redis+unix")
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_MAX_TTL_SECONDS = 30 * 86400

REMEDIES = {
    "OOM": "Redis is full and its policy forbids eviction; set maxmemory-policy allkeys-lru",
    "READONLY": "this Redis is a replica; use the primary's address in the URL",
    "LOADING": "Redis is loading persisted data; a cache needs no persistence, so turn it off (save '' and appendonly "
    "no)",
    "NOAUTH": "Redis requires a password; add user and password, or password_file=, to the URL",
    "WRONGPASS": "Redis rejects this user and password; check the URL and ACL LIST",
    "NOPERM": f"the Redis user lacks permissions; grant them: ACL SETUSER NAME {ACL_RULE}",
    "MISCONF": "Redis cannot save to disk and rejects writes; turn persistence off (save '' and appendonly no)",
    "CLUSTERDOWN": "the Redis Cluster does not serve all slots; check CLUSTER INFO",
    "MOVED": "this Redis is part of a cluster; add cluster=on",
    "ASK": "this Redis is part of a cluster; add cluster=on",
    "MASTERDOWN": "this Redis is a replica without its primary; use the primary's address in the URL",
}


def remedy(code: str) -> str:
    """Return the remedy for an error code of the server. The error's text is not used, since it may contain keys."""
    return REMEDIES.get(code, f"Redis answered with {code}")


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """Options of one Redis tier."""

    text: str
    """The URL without user and password, for messages."""
    address: Address
    """Host and port; for a Unix socket, its path and 0."""
    is_tls: bool = False
    cacert: str = ""
    verify: bool = True
    username: str = ""
    password: str = field(default="", repr=False)
    db: int = 0
    ttl_seconds: int = 3600
    """Time to live of values in seconds; 0 keeps values until Redis evicts them."""
    connections: int = 4
    prefix: str = "kv"
    cluster: bool = False
    encrypt: bool = False
    hedge: bool = True


def redis_options(spec: TierSpec) -> RedisOptions:
    """Parse the options of a Redis URL.

    Raises:
        UsageError: an option is unknown, or its value is invalid.
    """

    def refuse(what: str) -> UsageError:
        return UsageError(f"tier {spec.text}: {what}", field="tier")

    spec.check_options(_OPTIONS)
    if spec.scheme not in _SCHEMES:
        raise refuse(f"not a Redis tier; use one of the schemes {', '.join(_SCHEMES)}")
    is_unix = spec.scheme == "redis+unix"
    password = spec.password
    if "password_file" in spec.options:
        if password:
            raise refuse("both a password and password_file= are set; keep the file")
        password = read_secret_file(Path(spec.options["password_file"]), "tier").decode("utf-8", "strict")
    if spec.username and not password:
        raise refuse("a user is set without a password; add the password, or password_file=")
    path = "" if is_unix else spec.path.strip("/")
    if path and not path.isdecimal():
        raise refuse(f"the path must be the database number, not {path!r}")
    if is_unix and not spec.path.strip("/"):
        raise refuse("the socket is missing; use redis+unix:///run/redis.sock")
    if not is_unix and not spec.host:
        raise refuse("the host is missing; use redis://HOST:6379/0")
    options = RedisOptions(
        text=spec.text,
        address=(spec.path, 0) if is_unix else (spec.host, spec.port or DEFAULT_PORT),
        is_tls=spec.scheme == "rediss",
        cacert=spec.option("cacert", str, ""),
        verify=spec.option("verify", boolean, True),
        username=spec.username,
        password=password,
        db=int(path or 0),
        ttl_seconds=spec.option("ttl", whole(0, _MAX_TTL_SECONDS), 3600),
        connections=spec.option("connections", whole(1, 64), 4),
        prefix=spec.option("prefix", _prefix, "kv"),
        cluster=spec.option("cluster", boolean, False),
        encrypt=spec.option("encrypt", boolean, False),
        hedge=spec.option("hedge", boolean, True),
    )
    if options.cluster and (options.db or is_unix):
        raise refuse("a cluster has only database 0 and no Unix socket")
    if (options.cacert or not options.verify) and not options.is_tls:
        raise refuse("cacert= and verify= need rediss://")
    return options


def _prefix(text: str) -> str:
    if not _PREFIX.fullmatch(text):
        raise ValueError("must be 1 to 64 letters, digits, or any of _ . : -")
    return text
