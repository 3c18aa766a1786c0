"""How one request's KV came to be here: what was decided, what was loaded, from where; told once, in the answer."""

from dataclasses import dataclass, field, replace

from kvferry.core.ids import WorkerId
from kvferry.kv.connector import LoadOutcome
from kvferry.kv.price import Decision
from kvferry.rpc.token_source import KvReport
from kvferry.workers.loop import StreamItem

PEER = "peer"


@dataclass(slots=True)
class Arrival:
    """Listens to a stream's items and keeps what they say about KV."""

    worker_id: WorkerId
    reports: list[KvReport] = field(default_factory=list)
    from_peer: LoadOutcome | None = None
    """How reading a peer's offer ended; `None`: it was not tried."""
    is_declined: bool = False
    """An offer was not read because computing was cheaper."""
    from_tiers: int = 0
    """Blocks that tiers brought."""

    def hear(self, item: StreamItem) -> None:
        """Take in one item."""
        if item.decision is not None:
            self._decided(item.decision)
        if item.load is not None:
            self._loaded(item.load)

    def take_reports(self) -> list[KvReport]:
        """What is new since the last call."""
        reports, self.reports = self.reports, []
        return reports

    def _decided(self, made: Decision) -> None:
        self.is_declined = self.is_declined or (made.source == PEER and made.num_loaded == 0)
        self.reports.append(
            KvReport(
                worker_id=self.worker_id,
                source=made.source,
                first_token=made.first_token,
                num_tokens=made.num_tokens,
                num_chosen=made.num_loaded,
                num_bytes=made.num_bytes,
                expected_load_seconds=made.load_seconds,
                expected_compute_seconds=made.compute_seconds,
                is_forced=made.is_forced,
            )
        )

    def _loaded(self, outcome: LoadOutcome) -> None:
        if outcome.source == PEER:
            self.from_peer = outcome
        else:
            self.from_tiers += outcome.num_blocks
        here = 0 if outcome.source == PEER and outcome.failure else outcome.num_blocks
        last = self.reports.pop() if self.reports else KvReport(self.worker_id, outcome.source)
        self.reports.append(
            replace(
                last,
                blocks_loaded=here,
                bytes_loaded=outcome.num_bytes if here else 0,
                load_seconds=outcome.seconds,
                failure=outcome.failure or "",
            )
        )
