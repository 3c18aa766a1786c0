"""Tiers by their URL's scheme, imported only when named; and all of a worker's tiers as one stack."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import cast

from kvferry.core.errors import UsageError
from kvferry.kv.tiers.spec import TierSpec, parse_tier
from kvferry.kv.tiers.tier import Tier

_MODULES = {"dram": "kvferry.kv.tiers.dram"}


def schemes() -> list[str]:
    """What a tier's URL can begin with."""
    return sorted(_MODULES)


def open_tiers(urls: Sequence[str], *, object_bytes: int) -> list[Tier]:
    """The tiers of these URLs, in their order. Those opened before one that fails are closed.

    Raises:
        UsageError: a URL is wrong, names a tier twice or memory not first, or the tier cannot be opened.
    """
    specs = check_tiers(urls)
    opened: list[Tier] = []
    try:
        for spec in specs:
            opened.append(_open(spec, object_bytes))  # noqa: PERF401  what is open must be closed if the next fails
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


def _open(spec: TierSpec, object_bytes: int) -> Tier:
    make = cast(Callable[[TierSpec, int], Tier], import_module(_MODULES[spec.scheme]).open_tier)
    return make(spec, object_bytes)
