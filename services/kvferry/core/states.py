"""State machines as tables: every legal transition in one place, anything else raises.

A `Machine` is the table; the state itself is a field of whoever owns it. Docs draw their diagrams
from `Machine.mermaid`, so a picture cannot disagree with the code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from kvferry.core.errors import InvariantBroken

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class Machine(Generic[S, E]):
    """A transition table from (state, event) to the next state."""

    name: str
    initial: S
    final: frozenset[S]
    """States that nothing leaves."""
    table: Mapping[tuple[S, E], S]

    def next(self, state: S, event: E) -> S:
        """The state after `event`.

        Raises:
            InvariantBroken: the table has no such transition.
        """
        try:
            return self.table[(state, event)]
        except KeyError:
            legal = sorted(e.value for (s, e) in self.table if s == state)
            raise InvariantBroken(
                f"{self.name}: event {event.value!r} is illegal in state {state.value!r} (legal here: {legal})"
            ) from None

    def allows(self, state: S, event: E) -> bool:
        """Whether the table has a transition for `event` in `state`."""
        return (state, event) in self.table

    def mermaid(self) -> str:
        """The table as a Mermaid state diagram."""
        lines = ["stateDiagram-v2", f"    [*] --> {self.initial.value}"]
        lines += [f"    {s.value} --> {t.value}: {e.value}" for (s, e), t in self.table.items()]
        lines += [f"    {s.value} --> [*]" for s in sorted(self.final)]
        return "\n".join(lines)
