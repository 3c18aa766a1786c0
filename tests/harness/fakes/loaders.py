"""Loaders without a transport."""

from collections.abc import Sequence

from harness.fakes.engines import attach
from kvferry.core.ids import BlockId, RequestId
from kvferry.engine.engine import Engine
from kvferry.kv.interface.connector import LoadOutcome, PagesQuiet


class HeldLoader:
    """A loader whose loads end on request of the test."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.started: list[tuple[int, RequestId, int, list[BlockId]]] = []
        self.cancelled: list[RequestId] = []
        attach(engine, loader=self)

    def start(
        self, job: int, request_id: RequestId, source: object, first_block: int, targets: Sequence[BlockId]
    ) -> None:
        self.started.append((job, request_id, first_block, list(targets)))

    def cancel(self, request_id: RequestId) -> None:
        self.cancelled.append(request_id)

    @property
    def num_active(self) -> int:
        return len(self.started)

    def end(self, failure: str | None, *, quiet: bool = True) -> None:
        job, request_id, _, targets = self.started[-1]
        self.engine.post(LoadOutcome(request_id, job, failure, len(targets), 0, 0.1))
        if quiet:
            self.engine.post(PagesQuiet(job))
