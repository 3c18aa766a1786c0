"""Registry of mutations, i.e. deliberate bugs that the explorer must detect."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from harness.explorer.parts import PRODUCTION, Parts

INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class Mutation:
    """A deliberate bug and the scenario that detects it."""

    name: str
    stands_for: str
    """Description of the class of bug."""
    scenario: str
    """Name of the scenario that detects it."""
    parts: Parts
    seen: str = ""
    """Public issue about a bug of this class; empty if none is known."""


FOUND: list[Mutation] = []
"""All registered mutations; filled by importing the modules that define them."""


def mutation(
    stands_for: str, scenario: str, slot: str, seen: str = "", **more: Any
) -> Callable[[type[Any]], type[Any]]:
    """Decorate a class: register it as a replacement for the field `slot` of `Parts`."""

    def register(made: type[Any]) -> type[Any]:
        name = "".join(f" {c.lower()}" if c.isupper() else c for c in made.__name__).strip()
        swapped: dict[str, Any] = {slot: made, **more}
        parts = replace(PRODUCTION, **swapped)
        FOUND.append(Mutation(name, stands_for, scenario, parts, seen))
        return made

    return register


def anything(*_: Any, **__: Any) -> None:
    """Accept any arguments; replaces a check that a mutation disables."""
