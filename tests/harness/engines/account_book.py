"""Checks the accounts of an engine's prompts against a count of its own: every token has one source and one cause."""

from collections import Counter
from collections.abc import Iterable

from kvferry.core.causes import AGAIN, ComputeCause
from kvferry.core.ids import RequestId
from kvferry.engine.engine import Engine
from kvferry.engine.schedule.step.kv_jobs import SequenceUpdate
from kvferry.engine.schedule.step.sequence import Sequence


class AccountBook:
    """Follows the sequences of one engine from now on."""

    def __init__(self, engine: Engine) -> None:
        self._scheduler = engine.scheduler
        self._sequences: list[Sequence] = []
        self._latest: dict[RequestId, Sequence] = {}
        self.reported: dict[RequestId, Counter[ComputeCause]] = {}
        """Computed tokens that the updates reported, by request."""
        self._before = self._totals()
        self._num_computed = 0
        add, advance = self._scheduler.add, self._scheduler._advance

        def noted(sequence: Sequence) -> None:
            add(sequence)
            self._sequences.append(sequence)
            self._latest[sequence.request_id] = sequence
            self.reported[sequence.request_id] = Counter()

        def counted(sequence: Sequence, count: int) -> None:
            num_prompt, start = sequence.request.num_prompt, sequence.kv.num_computed
            self._num_computed += min(num_prompt, start + count) - min(num_prompt, start)
            advance(sequence, count)

        self._scheduler.add = noted  # type: ignore[method-assign]
        self._scheduler._advance = counted  # type: ignore[method-assign]

    def stepped(self, updates: Iterable[SequenceUpdate]) -> None:
        """Check the updates of a step: with the first token, the sources of a new prompt sum to its length."""
        for update in updates:
            sequence = self._latest.get(update.request_id)
            if sequence is None:
                continue
            reported, is_first = self.reported[update.request_id], not self.reported[update.request_id]
            for one in update.computed:
                assert one.num_tokens > 0
                reported[one.cause] += one.num_tokens
            request, account = sequence.request, sequence.kv.account
            is_new = account.num_given == request.num_prompt
            if is_first and is_new and (update.tokens or update.embedding is not None):
                computed = sum(count for cause, count in reported.items() if cause not in AGAIN)
                assert update.num_cached + update.num_loaded + computed == request.num_prompt, (update, reported)
        self.check()

    def check(self) -> None:
        """Check the engine's counters against all sequences so far."""
        num_computed, num_counted = (now - before for now, before in zip(self._totals(), self._before, strict=True))
        assert num_computed == self._num_computed
        assert num_counted == sum(min(s.kv.account.num_counted, s.request.num_prompt) for s in self._sequences)

    def _totals(self) -> tuple[int, int]:
        """Return the number of computed tokens, and of tokens that have a source."""
        totals = self._scheduler.accounts.totals
        first = sum(count for cause, count in totals.computed.items() if cause not in AGAIN)
        return sum(totals.computed.values()), first + totals.cached + totals.peer + totals.tier
