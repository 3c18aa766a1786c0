"""The latest times at which waiting sequences can start and still meet their deadlines."""

import heapq

from kvferry.core.errors import DeadlinePassed
from kvferry.core.ids import RequestId
from kvferry.engine.schedule.step.sequence import Sequence, SequenceState


class Deadlines:
    """Sequences by the time at which they must have started. An entry stays until that time, even if its sequence has
    ended."""

    def __init__(self) -> None:
        self._starts: list[tuple[float, int, RequestId]] = []

    def add(self, sequence: Sequence) -> None:
        """Add a waiting sequence, if it has a deadline."""
        if sequence.request.latest_start is not None:
            heapq.heappush(self._starts, (sequence.request.latest_start, sequence.arrival, sequence.request_id))

    def take_overdue(self, now: float) -> list[tuple[RequestId, int]]:
        """Return request and arrival of the sequences that must have started before `now`; they may have ended."""
        found: list[tuple[RequestId, int]] = []
        while self._starts and self._starts[0][0] < now:
            _, arrival, request_id = heapq.heappop(self._starts)
            found.append((request_id, arrival))
        return found


def is_overdue(sequence: Sequence) -> bool:
    """Return whether a sequence past its latest start is refused, which is the case if nothing has been computed or
    sampled for it."""
    is_new = sequence.num_preemptions == 0 and sequence.sampling.num_generated == 0
    return sequence.state is SequenceState.WAITING and is_new


def overdue(request_id: RequestId) -> DeadlinePassed:
    """Return the error of a sequence that has waited too long."""
    return DeadlinePassed(
        f"request {request_id} waited until its deadline could no longer be met; retry on a less loaded worker or with "
        "a longer deadline"
    )
