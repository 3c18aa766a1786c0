"""Sequences whose KV is being loaded, and the loads that are planned for them."""

from collections.abc import Collection, Iterable

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockId, RequestId
from kvferry.engine.schedule.step.kv_jobs import LoadJob
from kvferry.engine.schedule.step.sequence import Sequence, SequenceEvent


class LoadingSequences:
    """The loading sequences of a scheduler, from `start` to `take` or `abort`."""

    def __init__(self) -> None:
        self._sequences: dict[RequestId, Sequence] = {}
        self._jobs: list[LoadJob] = []

    def start(self, sequence: Sequence, first_block: int, targets: Iterable[BlockId]) -> None:
        """Plan the load of a sequence's blocks from `first_block` on into pages of its table, in the order of a ticket.

        Args:
            sequence: a sequence with `remote` KV.
            first_block: index of the first block to load.
            targets: pages to write, in the order of a ticket.

        Raises:
            InvariantBroken: the sequence has nothing to load.
        """
        remote = sequence.kv.remote
        if remote is None:
            raise InvariantBroken(f"request {sequence.request_id} has nothing to load")
        sequence.move(SequenceEvent.LOAD)
        self._sequences[sequence.request_id] = sequence
        is_return = sequence.num_preemptions > 0
        self._jobs.append(LoadJob(sequence.request_id, remote, first_block, tuple(targets), is_return=is_return))

    def take(self, request_id: RequestId) -> Sequence | None:
        """Remove and return the sequence of a load that has ended; `None` if the sequence has ended."""
        return self._sequences.pop(request_id, None)

    def abort(self, request_id: RequestId) -> None:
        """Remove a sequence and its planned load, if there is one."""
        self._sequences.pop(request_id, None)
        self._jobs = [job for job in self._jobs if job.request_id != request_id]

    def take_jobs(self) -> list[LoadJob]:
        """Return the loads planned since the last call."""
        jobs, self._jobs = self._jobs, []
        return jobs

    @property
    def sequences(self) -> Collection[Sequence]:
        """The loading sequences."""
        return self._sequences.values()

    def __len__(self) -> int:
        return len(self._sequences)
