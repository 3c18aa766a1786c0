"""Batch slots: rows of the persistent block tables on the device, and the cells to update before each step.

A sequence keeps its slot as long as it takes part in every step, so that only changed cells are copied:

    slot     blocks on the device          step's table            cells to write
      0      7 1                           7 1 4                   (0, 2) = 4
      1      -                             9 3                     (1, 0) = 9, (1, 1) = 3
    spare    -                             (for padding rows)

Each layer group with a window (`kv.pages.layer_groups`) has its own block tables, whose rows begin with the first block
inside the window. They are rewritten from the beginning whenever the window passes a block.

The device also keeps the last token sampled in each batch slot, as input of the next step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import RequestId
from kvferry.engine.schedule.step.step import ScheduledSequence


@dataclass(slots=True)
class _Row:
    """A row of a layer group's block tables on the device."""

    version: int = 0
    num_passed: int = 0
    """Number of leading blocks that are not in the row."""
    num_blocks: int = 0
    """Number of blocks of that version of the block table that are on the device."""


@dataclass(slots=True)
class _Slot:
    """A batch slot that is assigned to a sequence."""

    number: int
    rows: list[_Row]
    """Row of each group."""
    drawn: tuple[int, int] | None = None
    """Table version and position of the last token sampled in this slot; `None` if that token is not on the device. A
    new request with a reused id has a different table version."""


@dataclass(slots=True)
class Writes:
    """Cells of the flattened block tables and their new values; a cell occurs at most once."""

    cells: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


def num_passed(s: ScheduledSequence, group: int) -> int:
    """Return the number of leading blocks of a sequence that are behind the window of a layer group."""
    return s.num_passed[group] if s.num_passed else 0


class BatchSlots:
    """Assignment of batch slots to sequences, and state of the slots on the device. Not thread-safe."""

    def __init__(self, count: int, width: int, num_groups: int = 1) -> None:
        """
        Args:
            count: maximum number of sequences; one spare slot is added.
            width: blocks per row.
            num_groups: number of layer groups.
        """
        self.spare = count
        """Index of the spare slot, which padding rows use."""
        self._width, self._num_groups = width, num_groups
        self._free = list(range(count - 1, -1, -1))
        self._held: dict[RequestId, _Slot] = {}

    def assign(self, scheduled: Sequence[ScheduledSequence]) -> list[int]:
        """Assign slots to a step's sequences, in order. Slots of sequences that are not in the step are freed.

        Raises:
            InvariantBroken: there are more sequences than slots.
        """
        here = {s.request_id for s in scheduled}
        for gone in [request for request in self._held if request not in here]:
            self._free.append(self._held.pop(gone).number)
        for s in scheduled:
            if s.request_id not in self._held:
                if not self._free:
                    raise InvariantBroken(f"{len(scheduled)} sequences in a step with {self.spare} batch slots")
                self._held[s.request_id] = _Slot(self._free.pop(), [_Row() for _ in range(self._num_groups)])
        return [self._held[s.request_id].number for s in scheduled]

    def forget(self) -> None:
        """Free all slots, since the state on the device is unknown."""
        self._free += [place.number for place in self._held.values()]
        self._held.clear()

    def changes(self, scheduled: Sequence[ScheduledSequence], needed: Sequence[int], group: int = 0) -> Writes:
        """Return the block table cells to write for sequences that have slots, and record these cells as written.

        Args:
            scheduled: the step's sequences.
            needed: number of blocks that the step reads or writes, for each sequence.
            group: the layer group.
        """
        writes = Writes()
        for s, end in zip(scheduled, needed, strict=True):
            place, passed = self._held[s.request_id], num_passed(s, group)
            row, count = place.rows[group], end - passed
            if not s.table_version or s.table_version != row.version or passed != row.num_passed:
                row.num_blocks, row.version, row.num_passed = 0, s.table_version, passed
            if row.num_blocks < count:
                start, ids = place.number * self._width, s.further_ids[group - 1] if group else s.block_ids
                writes.cells += range(start + row.num_blocks, start + count)
                writes.blocks += ids[passed + row.num_blocks : end]
                row.num_blocks = count
        return writes

    def is_drawn_here(self, s: ScheduledSequence) -> bool:
        """Return whether the sequence's next input token is on the device."""
        held = self._held.get(s.request_id)
        return held is not None and bool(s.table_version) and held.drawn == (s.table_version, s.num_computed)

    def drew(self, s: ScheduledSequence, *, on_device: bool) -> None:
        """Record that a step samples the sequence's next token; `on_device` is whether the token stays on the
        device."""
        self._held[s.request_id].drawn = (s.table_version, s.num_computed + s.num_scheduled) if on_device else None
