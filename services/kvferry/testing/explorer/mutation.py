"""What a mutation is: one rule of the machine broken on purpose, and where the explorer should notice."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvferry.testing.explorer.parts import PRODUCTION, Parts

INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class Mutation:
    """One rule broken."""

    name: str
    stands_for: str
    """The class of bug, in words."""
    scenario: str
    """Where it is looked for."""
    parts: Parts
    seen: str = ""
    """A public thread about a bug of this class."""


FOUND: list[Mutation] = []
"""Filled as the modules that define mutations are imported."""


def mutation(
    stands_for: str, scenario: str, slot: str, seen: str = "", **more: Any
) -> Callable[[type[Any]], type[Any]]:
    """Register a class as a mutation of the part `slot`."""

    def register(made: type[Any]) -> type[Any]:
        name = "".join(f" {c.lower()}" if c.isupper() else c for c in made.__name__).strip()
        swapped: dict[str, Any] = {slot: made, **more}
        parts = replace(PRODUCTION, **swapped)
        FOUND.append(Mutation(name, stands_for, scenario, parts, seen))
        return made

    return register


def anything(*_: Any, **__: Any) -> None:
    """No check at all."""
