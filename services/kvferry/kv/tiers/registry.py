"""Tiers by their URL's scheme, imported only when named; and all of a worker's tiers as one stack."""

from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

from kvferry.core.clock import Clock
from kvferry.core.errors import UsageError
from kvferry.kv.tiers.spec import TierSpec, parse_tier
from kvferry.kv.tiers.tier import Tier

_MODULES = {
    "disk": "kvferry.kv.tiers.disk",
    "dram": "kvferry.kv.tiers.dram",
    "redis": "kvferry.kv.tiers.redis_tier",
    "rediss": "kvferry.kv.tiers.redis_tier",
    "redis+unix": "kvferry.kv.tiers.redis_tier",
}


class Opener(Protocol):
    """A tier module's `open_tier`."""

    def __call__(self, spec: TierSpec, *, object_bytes: int, secret: bytes, clock: Clock) -> Tier:
        """Raises UsageError: an option is wrong, a package is missing, or the tier cannot be reached."""
        ...


def schemes() -> list[str]:
    """What a tier's URL can begin with."""
    return sorted(_MODULES)


def open_tiers(urls: Sequence[str], *, object_bytes: int, secret: bytes, clock: Clock) -> list[Tier]:
    """The tiers of these URLs, in their order. Blocks until each was reached; those opened before one that fails are
    closed.

    Args:
        object_bytes: length of every object.
        secret: the pool's; keys what proves an object to be its own.

    Raises:
        UsageError: a URL is wrong, names a tier twice or memory not first, or the tier cannot be opened.
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
    """The URLs taken apart.

    Raises:
        UsageError: one is wrong or unknown, names a kind twice, or memory not first.
    """
    specs = [parse_tier(url) for url in urls]
    for place, spec in enumerate(specs):
        if spec.scheme not in _MODULES:
            raise UsageError(f"there is no tier {spec.scheme}://; known are {', '.join(schemes())}", field="tier")
        if spec.scheme == "dram" and place > 0:
            raise UsageError("tier dram:// must be the first: everything slower goes through it", field="tier")
    kinds = [_MODULES[spec.scheme] for spec in specs]
    if len(set(kinds)) < len(kinds):
        raise UsageError("a worker has at most one tier of each kind", field="tier")
    return specs
