"""Moves of the KV of accepted paths, so that a sequence's tokens are in consecutive slots after each step.

rows    root  a  b  c  d          accepted path  a, d
slots     7   8  9 10 11    ──►   the KV of d moves from slot 11 to slot 9; slots 10 and 11 are overwritten later
"""

from collections.abc import Sequence

from kvferry.engine.execute.tensors.batch import StepBatch
from kvferry.engine.schedule.step.draft_tree import moves
from kvferry.engine.schedule.step.step import Sampled, ScheduledSequence, accepted_path


def tree_moves(
    scheduled: Sequence[ScheduledSequence], sampled: Sequence[Sampled], batch: StepBatch
) -> list[tuple[int, int]]:
    """Return the source and target slot of each move, in all layer groups.

    Args:
        scheduled: the plan's sequences.
        sampled: results of all sampled rows.
        batch: the step.
    """
    found: list[tuple[int, int]] = []
    end = row = 0
    for s in scheduled:
        end += s.num_scheduled
        if s.parents:
            root = end - len(s.parents) - 1
            path = accepted_path(s, sampled[row : row + s.num_sampled])
            for slots in (batch.slots, *batch.further_slots):
                found += [(int(slots[root + source]), int(slots[root + target])) for source, target in moves(path)]
        row += s.num_sampled
    return found
