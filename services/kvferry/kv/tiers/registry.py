"""Registry of tiers by URL scheme; checks and opens a worker's list of tiers. Modules are imported on first use."""

from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

from kvferry.core.clock import Clock
from kvferry.core.errors import UsageError
from kvferry.kv.tiers.interface.spec import TierSpec, parse_tier
from kvferry.kv.tiers.interface.tier import Tier

_MODULES = {
    "disk": "kvferry.kv.tiers.disk.disk_tier",
    "dram": "kvferry.kv.tiers.dram",
    "redis": "kvferry.kv.tiers.redis.redis_tier",
    "rediss": "kvferry.kv.tiers.redis.redis_tier",
    "redis+unix": "kvferry.kv.tiers.redis.redis_tier",
}


class Opener(Protocol):
    """Signature of the function `open_tier` in a tier's module."""

    def __call__(self, spec: TierSpec, *, object_bytes: int, secret: bytes, clock: Clock) -> Tier:
        """Open a tier; raise `UsageError` if an option is invalid, a package is missing, or the tier cannot be
        reached."""
        ...


def schemes() -> list[str]:
    """Return the known URL schemes, sorted."""
    return sorted(_MODULES)


def open_tiers(urls: Sequence[str], *, object_bytes: int, secret: bytes, clock: Clock) -> list[Tier]:
    """Open tiers by URL, in order, and block until each tier has been reached. If a tier fails, the tiers opened before
    it are closed.

    Args:
        urls: URLs of the tiers, nearest first.
        object_bytes: length of every object.
        secret: the pool's tier secret, from which the keys of frames are derived.
        clock: clock of the tiers.

    Raises:
        UsageError: a URL is malformed, a kind of tier is repeated, `dram` is not first, or a tier cannot be opened.
    """
    specs = check_tiers(urls)
    opened: list[Tier] = []
    try:
        for spec in specs:
            open_tier = cast(Opener, import_module(_MODULES[spec.scheme]).open_tier)
            opened.append(open_tier(spec, object_bytes=object_bytes, secret=secret, clock=clock))
    except BaseException:
        for tier in opened:
            tier.close()
        raise
    return opened


def check_tiers(urls: Sequence[str]) -> list[TierSpec]:
    """Parse tier URLs and check their combination.

    Raises:
        UsageError: a URL is malformed or unknown, a kind of tier is repeated, or `dram` is not first.
    """
    specs = [parse_tier(url) for url in urls]
    for place, spec in enumerate(specs):
        if spec.scheme not in _MODULES:
            raise UsageError(f"unknown tier {spec.scheme}://; use one of {', '.join(schemes())}", field="tier")
        if spec.scheme == "dram" and place > 0:
            raise UsageError("tier dram:// must come first, since slower tiers copy through it", field="tier")
    kinds = [_MODULES[spec.scheme] for spec in specs]
    if len(set(kinds)) < len(kinds):
        raise UsageError("a worker can have only one tier of each kind; remove the others", field="tier")
    return specs
