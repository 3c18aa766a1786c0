"""KV reports of a request: load decisions and loaded blocks by source, sent once in the request's response."""

from dataclasses import dataclass, field, replace

from kvferry.core.ids import WorkerId
from kvferry.core.inference.chunks import KvReport
from kvferry.engine.loop.engine_stream import StreamItem
from kvferry.kv.interface.connector import LoadOutcome
from kvferry.kv.pricing.price import LoadDecision

PEER = "peer"


@dataclass(slots=True)
class KvReportBuilder:
    """Collects load decisions and outcomes from the events of a stream."""

    worker_id: WorkerId
    reports: list[KvReport] = field(default_factory=list)
    from_peer: LoadOutcome | None = None
    """Outcome of reading a peer's offer; `None` if the read was not attempted."""
    is_declined: bool = False
    """Whether an offer was not read because computing the KV was faster."""
    from_tiers: int = 0
    """Number of blocks loaded from tiers."""

    def add(self, item: StreamItem) -> None:
        """Process an event of the stream."""
        if item.decision is not None:
            self._decided(item.decision)
        if item.load is not None:
            self._loaded(item.load)

    def take_reports(self) -> list[KvReport]:
        """Return and clear the reports since the last call."""
        reports, self.reports = self.reports, []
        return reports

    def _decided(self, made: LoadDecision) -> None:
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
