"""Which row of the device's block tables is whose, and what must be written there before a step.

A sequence keeps its place for as long as it is in every step, so that only what changed travels:

    place    blocks on the device          step's table            to be written
      0      7 1                           7 1 4                   (0, 2) = 4
      1      -                             9 3                     (1, 0) = 9, (1, 1) = 3
    spare    -                             (padding of batches; nobody's)

The same place holds the token that the sequence drew last, where the next step finds it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import RequestId
from kvferry.engine.step import ScheduledSequence


@dataclass(slots=True)
class _Place:
    """One row."""

    number: int
    version: int = 0
    num_blocks: int = 0
    """On the device, of the table of that version."""
    drawn: tuple[int, int] | None = None
    """Version of the table and position of the token that the device holds here. A request that ended and came anew
    under its old name has another table."""


@dataclass(slots=True)
class Writes:
    """Cells of the flat tables and what goes there; no cell twice."""

    cells: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


class Places:
    """The rows of one table. One thread."""

    def __init__(self, count: int, width: int) -> None:
        """
        Args:
            count: sequences at most; one row more is spare.
            width: blocks of a row.
        """
        self.spare = count
        """The row of padding."""
        self._width = width
        self._free = list(range(count - 1, -1, -1))
        self._held: dict[RequestId, _Place] = {}

    def seat(self, scheduled: Sequence[ScheduledSequence]) -> list[int]:
        """The places of a step's sequences, in their order. Whoever is not in the step loses its place.

        Raises:
            InvariantBroken: there are more sequences than places.
        """
        here = {s.request_id for s in scheduled}
        for gone in [request for request in self._held if request not in here]:
            self._free.append(self._held.pop(gone).number)
        for s in scheduled:
            if s.request_id not in self._held:
                if not self._free:
                    raise InvariantBroken(f"{len(scheduled)} sequences in a step, and places for {self.spare}")
                self._held[s.request_id] = _Place(self._free.pop())
        return [self._held[s.request_id].number for s in scheduled]

    def forget(self) -> None:
        """Everybody loses its place, and with it what the device was taken to hold."""
        self._free += [place.number for place in self._held.values()]
        self._held.clear()

    def changes(self, scheduled: Sequence[ScheduledSequence], needed: Sequence[int]) -> Writes:
        """What the tables lack for sequences that have places; they have it from now on.

        Args:
            scheduled: the step's.
            needed: blocks of each that the step reads or writes.
        """
        writes = Writes()
        for s, count in zip(scheduled, needed, strict=True):
            place = self._held[s.request_id]
            if not s.table_version or s.table_version != place.version:
                place.num_blocks, place.version = 0, s.table_version
            if place.num_blocks < count:
                start = place.number * self._width
                writes.cells += range(start + place.num_blocks, start + count)
                writes.blocks += s.block_ids[place.num_blocks : count]
                place.num_blocks = count
        return writes

    def is_drawn_here(self, s: ScheduledSequence) -> bool:
        """Whether the device holds the token that the sequence goes on with."""
        held = self._held.get(s.request_id)
        return held is not None and bool(s.table_version) and held.drawn == (s.table_version, s.num_computed)

    def drew(self, s: ScheduledSequence, *, on_device: bool) -> None:
        """A step draws the sequence's next token, and the device keeps it, or does not."""
        self._held[s.request_id].drawn = (s.table_version, s.num_computed + s.num_scheduled) if on_device else None
