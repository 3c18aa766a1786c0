"""Admitted sequences, which hold pages: those that take part in steps, and those whose KV is being loaded.

admission    run, or load
load ended   take_loaded, then run, or back to the queue
scheduler    remove: preempted, finished or aborted
"""

import bisect
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as OrderedView

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockId, RequestId
from kvferry.engine.schedule.plan.prompt_accounts import PromptAccounts
from kvferry.engine.schedule.step.kv_jobs import LoadJob
from kvferry.engine.schedule.step.sequence import Sequence, SequenceEvent, SequenceState


class AdmittedSequences:
    """The running and the loading sequences of one scheduler, which no other module adds or removes."""

    def __init__(self, order: Callable[[Sequence], tuple[int, int]], accounts: PromptAccounts) -> None:
        """
        Args:
            order: sort key of the running sequences.
            accounts: counts the sources of their prompts' tokens.
        """
        self._order = order
        self._accounts = accounts
        self._running: list[Sequence] = []
        self._loading: dict[RequestId, Sequence] = {}
        self._jobs: list[LoadJob] = []

    def run(self, sequence: Sequence, event: SequenceEvent) -> None:
        """Add a sequence to the running ones.

        Args:
            sequence: a waiting sequence, or one that `take_loaded` returned.
            event: `ADMIT` or `LOADED`.
        """
        sequence.move(event)
        self._accounts.started(sequence)
        bisect.insort(self._running, sequence, key=self._order)

    def load(self, sequence: Sequence, first_block: int, targets: Iterable[BlockId]) -> None:
        """Add a waiting sequence to the loading ones, and plan the load of its blocks into pages of its table.

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
        self._loading[sequence.request_id] = sequence
        is_return = sequence.num_preemptions > 0
        self._jobs.append(LoadJob(sequence.request_id, remote, first_block, tuple(targets), is_return=is_return))

    def take_loaded(self, request_id: RequestId) -> Sequence | None:
        """Remove and return the sequence of a load that has ended; `None` if the sequence has ended."""
        return self._loading.pop(request_id, None)

    def take_jobs(self) -> list[LoadJob]:
        """Return the loads planned since the last call."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def remove(self, sequence: Sequence, event: SequenceEvent) -> None:
        """Remove a sequence, with its planned load if there is one.

        Args:
            sequence: a running or loading sequence.
            event: `PREEMPT`, `FINISH` or `ABORT`.
        """
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
        elif self._loading.pop(sequence.request_id, None) is not None:
            self._jobs = [job for job in self._jobs if job.request_id != sequence.request_id]
        sequence.move(event)

    @property
    def running(self) -> OrderedView[Sequence]:
        """The running sequences by order, without a copy."""
        return self._running

    @property
    def num_loading(self) -> int:
        """Number of sequences whose KV is being loaded."""
        return len(self._loading)

    def __len__(self) -> int:
        return len(self._running) + len(self._loading)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._running
        yield from self._loading.values()
