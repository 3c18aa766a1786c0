"""The fetcher over transports and peers that fail at each step: every fetch has an outcome, and the pages are not
written after it."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import pytest
from harness.waiting import until

from kvferry.core.clock import ManualClock
from kvferry.core.errors import TicketRejected, Unavailable
from kvferry.core.ids import BlockId, Incarnation, RequestId, TicketId
from kvferry.kv.fetcher import Fetcher
from kvferry.kv.handoff.transfers import TRANSFER_MACHINE, TransferState, TransferTimes
from kvferry.kv.interface.connector import FetchSource, LoadOutcome, PagesQuiet, Peer, Read, ReadError
from kvferry.kv.interface.ticket import Ticket
from kvferry.kv.pages.digests import page_digests
from kvferry.kv.pages.layout import KvLayout

LAYOUT = KvLayout("digest", "float32", 1, 1, 4, 4)
DEADLINE = 10.0


def a_ticket(connector: str = "scripted") -> Ticket:
    return Ticket("t", "w", "i", "peer:1", connector, LAYOUT.fingerprint, "", b"", 12, (5, 6, 7), (50, 60, 70), 0.0)


class Script:
    """Stands in for a transport, its reads and the peer; each step can be made to fail."""

    name = "scripted"

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.finished: list[bool] = []
        self.messages: list[LoadOutcome | PagesQuiet] = []
        self.changed = threading.Condition()
        self.reads: list[tuple[list[int], list[int]]] = []
        self.forgotten = 0
        self.fail: dict[str, Exception] = {}
        self.polls_until_done = 2
        self.seconds_per_poll = 0.0
        self.epochs = {5: 50, 6: 60, 7: 70}
        self.quiet = threading.Event()
        self.quiet.set()
        self.described = 0
        self.before: Callable[[str], None] = lambda _step: None

    def _step(self, name: str) -> None:
        self.before(name)
        if name in self.fail:
            raise self.fail[name]

    # methods of the peer
    def describe(self, peer: Peer, connector: str, layout: KvLayout, timeout: float) -> bytes:
        self.described += 1
        self._step("describe")
        return b"address"

    def claim(self, peer: Peer, ticket_id: TicketId, attempt: int, timeout: float, *, reader: int = 0) -> float:
        self._step("claim")
        return 30.0

    def renew(self, peer: Peer, ticket_id: TicketId, attempt: int, timeout: float, *, reader: int = 0) -> float:
        self._step("renew")
        return 30.0

    def finish(
        self, peer: Peer, ticket_id: TicketId, attempt: int, timeout: float, *, done: bool, reader: int = 0
    ) -> None:
        self.finished.append(done)
        self._step("finish")

    # methods of the transport
    def connect(self, peer: Peer, address: bytes) -> None:
        self._step("connect")

    def read(self, peer: Peer, remote: Sequence[int], local: Sequence[BlockId]) -> Read:
        self._step("read")
        self.reads.append((list(remote), list(local)))
        return self

    def read_epochs(self, peer: Peer, remote: Sequence[int], timeout: float) -> list[int]:
        self._step("read_epochs")
        return [self.epochs.get(b, 0) for b in remote]

    def forget(self, peer: Peer) -> None:
        self.forgotten += 1

    # methods of a read
    def poll(self) -> bool:
        self._step("poll")
        self.clock.advance(self.seconds_per_poll)
        self.polls_until_done -= 1
        return self.polls_until_done <= 0

    def wait(self, seconds: float) -> None:
        threading.Event().wait(min(seconds, 0.001))

    def is_quiet(self) -> bool:
        return self.quiet.is_set()

    # helpers for an engine
    def hear(self, message: LoadOutcome | PagesQuiet) -> None:
        with self.changed:
            self.messages.append(message)
            self.changed.notify_all()

    def wait_for(self, count: int) -> list[LoadOutcome | PagesQuiet]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.messages) >= count, DEADLINE), self.messages
            return list(self.messages)


def start(script: Script, *, ticket: Ticket | None = None, first_block: int = 0, num_blocks: int = 3) -> Fetcher:
    fetcher = Fetcher(script, script, LAYOUT, script.hear, clock=script.clock, times=TransferTimes(min_seconds=1.0))  # type: ignore[arg-type]
    targets = [BlockId(b) for b in range(20, 20 + num_blocks)]
    fetcher.start(1, RequestId("r"), FetchSource(ticket or a_ticket(), 1), first_block, targets)
    return fetcher


class Pages(Script):
    """A transport over real bytes, which can flip one of them in transit."""

    def __init__(self, flipped: int | None = None) -> None:
        super().__init__()
        self.flipped = flipped
        self.theirs = bytes(range(256)) * (8 * LAYOUT.block_bytes // 256)
        self.ours = bytearray(24 * LAYOUT.block_bytes)

    def read(self, peer: Peer, remote: Sequence[int], local: Sequence[BlockId]) -> Read:
        size = LAYOUT.block_bytes
        for theirs, ours in zip(remote, local, strict=True):
            self.ours[ours * size : (ours + 1) * size] = self.theirs[theirs * size : (theirs + 1) * size]
        if self.flipped is not None:
            self.ours[20 * size + self.flipped] ^= 1
        return super().read(peer, remote, local)

    def fetch(self, *, has_digests: bool, requires: bool = False) -> LoadOutcome:
        ticket = a_ticket()
        if has_digests:
            digests = page_digests(memoryview(self.theirs), LAYOUT.block_bytes, ticket.block_ids)
            ticket = msgspec.structs.replace(ticket, digests=digests)
        fetcher = Fetcher(
            self,  # type: ignore[arg-type]
            self,
            LAYOUT,
            self.hear,
            clock=self.clock,
            pages=memoryview(self.ours),
            requires_digests=requires,
        )
        fetcher.start(1, RequestId("r"), FetchSource(ticket, 1), 0, [BlockId(b) for b in (20, 21, 22)])
        got = outcome(self)
        fetcher._pool.shutdown()
        assert fetcher.num_active == 0
        return got


@pytest.mark.parametrize("flipped", [0, LAYOUT.block_bytes, 3 * LAYOUT.block_bytes - 1])
def test_a_byte_changed_in_transit_is_detected_by_the_digests(flipped: int) -> None:
    script = Pages(flipped)
    assert "corrupted" in (script.fetch(has_digests=True).failure or "")
    assert script.finished == [False]
    assert Pages(flipped).fetch(has_digests=False).failure is None, "without digests no byte is checked"


@pytest.mark.parametrize("requires", [False, True])
def test_data_with_its_digests_is_used(requires: bool) -> None:
    script = Pages()
    assert script.fetch(has_digests=True, requires=requires).failure is None
    assert script.finished == [True]


def test_a_worker_that_verifies_digests_reads_no_ticket_without_them() -> None:
    script = Pages()
    assert "--verify-kv" in (script.fetch(has_digests=False, requires=True).failure or "")
    assert script.reads == []


def outcome(script: Script) -> LoadOutcome:
    first, last = script.wait_for(2)
    assert isinstance(first, LoadOutcome)
    assert last == PagesQuiet(1)
    return first


def test_a_good_fetch_reads_by_position_verifies_and_finishes() -> None:
    script = Script()
    fetcher = start(script, first_block=1, num_blocks=2)
    got = outcome(script)
    assert (got.failure, got.num_blocks, got.num_bytes) == (None, 2, 2 * LAYOUT.block_bytes)
    assert script.reads == [([6, 7], [20, 21])]
    fetcher._pool.shutdown()
    assert script.finished == [True]
    assert fetcher.num_active == 0


@pytest.mark.parametrize("step", ["describe", "claim"])
def test_a_refusal_or_a_dead_peer_before_the_read_is_reported(step: str) -> None:
    for error in (TicketRejected("gone", reason="TICKET_GONE"), Unavailable("dead")):
        script = Script()
        script.fail[step] = error
        fetcher = start(script)
        got = outcome(script)
        assert got.failure is not None
        assert error.message in got.failure
        assert script.reads == []
        fetcher._pool.shutdown()


@pytest.mark.parametrize("step", ["connect", "read", "poll", "read_epochs"])
def test_a_read_that_breaks_is_reported_and_the_peer_connected_anew(step: str) -> None:
    script = Script()
    script.fail[step] = ReadError("broken wire")
    fetcher = start(script)
    assert outcome(script).failure == "broken wire"
    assert script.forgotten == 1
    script.fail.clear()
    script.messages.clear()
    script.polls_until_done = 1
    fetcher.start(1, RequestId("r"), FetchSource(a_ticket(), 2), 0, [BlockId(1), BlockId(2), BlockId(3)])
    assert outcome(script).failure is None
    assert script.described == 2
    fetcher._pool.shutdown()
    assert script.finished == [False, True]


def test_pages_reused_under_the_read_are_noticed() -> None:
    script = Script()
    script.epochs[6] += 1
    fetcher = start(script)
    assert "reused" in str(outcome(script).failure)
    fetcher._pool.shutdown()
    assert script.finished == [False]


def test_a_transfer_that_takes_too_long_is_given_up_but_its_pages_wait_for_quiet() -> None:
    script = Script()
    script.polls_until_done, script.seconds_per_poll = 1 << 30, 0.4
    script.quiet.clear()
    fetcher = start(script)
    (early,) = script.wait_for(1)
    assert isinstance(early, LoadOutcome)
    assert "longer than" in str(early.failure)
    assert fetcher.num_active == 1, "the transport may still write"
    script.quiet.set()
    assert outcome(script) is early
    fetcher._pool.shutdown()
    assert fetcher.num_active == 0


def test_a_long_read_renews_its_lease_and_survives_a_lost_renewal() -> None:
    script = Script()
    script.polls_until_done, script.seconds_per_poll = 3, 6.0
    script.fail["renew"] = Unavailable("lost")
    fetcher = Fetcher(script, script, LAYOUT, script.hear, clock=script.clock, times=TransferTimes(min_seconds=60.0))  # type: ignore[arg-type]
    fetcher.start(1, RequestId("r"), FetchSource(a_ticket(), 1), 0, [BlockId(1), BlockId(2), BlockId(3)])
    assert outcome(script).failure is None
    fetcher._pool.shutdown()


def test_a_read_without_progress_is_given_up_long_before_its_deadline() -> None:
    class Measured(Script):
        def progress(self) -> int:
            return 7

    script = Measured()
    script.polls_until_done, script.seconds_per_poll = 1 << 30, 0.4
    fetcher = Fetcher(script, script, LAYOUT, script.hear, clock=script.clock, times=TransferTimes(min_seconds=60.0))  # type: ignore[arg-type]
    fetcher.start(1, RequestId("r"), FetchSource(a_ticket(), 1), 0, [BlockId(1), BlockId(2), BlockId(3)])
    assert "no progress" in str(outcome(script).failure)
    fetcher._pool.shutdown()


def test_a_ticket_without_held_pages_is_read_without_a_claim_and_without_a_finish() -> None:
    script = Script()
    script.fail["claim"] = AssertionError("nothing is held")
    fetcher = start(script, ticket=msgspec.structs.replace(a_ticket(), held=False))
    assert outcome(script).failure is None
    fetcher._pool.shutdown()
    assert script.finished == []


def test_a_cancelled_fetch_ends_and_reports_it() -> None:
    script = Script()
    script.polls_until_done = 1 << 30
    fetcher = start(script)
    fetcher.cancel(RequestId("other"))
    fetcher.cancel(RequestId("r"))
    assert outcome(script).failure == "cancelled"
    fetcher._pool.shutdown()
    assert script.finished == [False]


def test_a_job_cancelled_while_it_waits_for_a_thread_releases_its_pages_immediately() -> None:
    script = Script()
    fetcher = Fetcher(script, script, LAYOUT, script.hear, clock=script.clock, max_parallel=1)  # type: ignore[arg-type]
    gate = threading.Event()
    fetcher._pool.submit(gate.wait)
    fetcher.start(1, RequestId("r"), FetchSource(a_ticket(), 1), 0, [BlockId(1), BlockId(2), BlockId(3)])
    fetcher.cancel(RequestId("r"))
    assert script.messages[1:] == [PagesQuiet(1)]
    assert fetcher.num_active == 0
    gate.set()
    fetcher._pool.shutdown()
    assert script.finished == [False], "the peer learns that its offer was not used"
    assert (len(script.messages), script.described, script.reads) == (2, 0, [])


@pytest.mark.parametrize("step", ["connect", "claim"])
def test_a_job_cancelled_while_its_peer_is_slow_releases_its_pages_immediately(step: str) -> None:
    script = Script()
    reached, gate = threading.Event(), threading.Event()

    def block(name: str) -> None:
        if name == step:
            reached.set()
            assert gate.wait(DEADLINE)

    script.before = block
    fetcher = start(script)
    assert reached.wait(DEADLINE)
    fetcher.cancel(RequestId("r"))
    assert script.messages[1:] == [PagesQuiet(1)], "the thread still waits for the peer"
    gate.set()
    fetcher._pool.shutdown()
    assert fetcher.num_active == 0
    assert (script.finished, script.reads, len(script.messages)) == ([False], [], 2)


def test_another_connector_is_refused_before_any_message() -> None:
    script = Script()
    fetcher = start(script, ticket=a_ticket("nixl"))
    assert "reads over 'scripted'" in str(outcome(script).failure)
    assert script.described == 0
    fetcher._pool.shutdown()


def test_an_unexpected_error_is_an_outcome_not_a_hang(caplog: pytest.LogCaptureFixture) -> None:
    script = Script()
    script.fail["poll"] = RuntimeError("surprise")
    fetcher = start(script)
    assert outcome(script).failure == "internal error while fetching"
    assert "surprise" in caplog.text
    fetcher._pool.shutdown()


def test_a_lost_finish_is_not_fatal() -> None:
    script = Script()
    script.fail["finish"] = Unavailable("lost")
    fetcher = start(script)
    assert outcome(script).failure is None
    fetcher._pool.shutdown()


def test_closing_ends_even_a_stalled_drain() -> None:
    script = Script()
    script.polls_until_done, script.seconds_per_poll = 1 << 30, 0.4
    script.quiet.clear()
    fetcher = start(script)
    script.wait_for(1)
    until(lambda: fetcher._drainer is not None, "the draining thread starts after the failure was reported")
    drainer = fetcher._drainer
    fetcher.close()
    assert drainer is not None
    drainer.join(DEADLINE)
    assert not drainer.is_alive()
    assert len(script.messages) == 1, "the pages were never quiet, so no such message was sent"


def test_stalled_reads_do_not_keep_healthy_peers_waiting() -> None:
    script = Script()
    script.polls_until_done, script.seconds_per_poll = 1 << 30, 0.4
    script.quiet.clear()
    fetcher = Fetcher(script, script, LAYOUT, script.hear, clock=script.clock, max_parallel=2)  # type: ignore[arg-type]
    targets = [BlockId(1), BlockId(2), BlockId(3)]
    for job in range(4):
        fetcher.start(job, RequestId(f"stalled-{job}"), FetchSource(a_ticket(), 1), 0, targets)
    script.wait_for(4)
    script.polls_until_done = 1
    fetcher.start(9, RequestId("healthy"), FetchSource(a_ticket(), 1), 0, targets)
    messages = script.wait_for(6)
    assert messages[-1] == PagesQuiet(9)
    assert fetcher.num_active == 4
    script.quiet.set()
    script.wait_for(10)
    assert fetcher.num_active == 0


def test_a_job_that_waited_too_long_for_its_turn_is_given_up() -> None:
    script = Script()
    fetcher = Fetcher(script, script, LAYOUT, script.hear, clock=script.clock, max_parallel=1)  # type: ignore[arg-type]
    gate = threading.Event()
    fetcher._pool.submit(gate.wait)
    fetcher.start(1, RequestId("r"), FetchSource(a_ticket(), 1), 0, [BlockId(1), BlockId(2), BlockId(3)])
    script.clock.advance(6.0)
    gate.set()
    assert "for other transfers" in str(outcome(script).failure)
    fetcher._pool.shutdown()


def test_the_state_of_a_restarted_peers_earlier_incarnation_is_dropped() -> None:
    script = Script()
    fetcher = start(script)
    outcome(script)
    script.messages.clear()
    script.polls_until_done = 1
    again = msgspec.structs.replace(a_ticket(), incarnation="j")
    fetcher.start(1, RequestId("r"), FetchSource(again, 1), 0, [BlockId(1), BlockId(2), BlockId(3)])
    assert outcome(script).failure is None
    assert script.forgotten == 1, "the transport's state for incarnation i"
    fetcher._pool.shutdown()


@pytest.mark.parametrize(
    ("error", "forgotten"),
    [(Unavailable("dead"), 1), (TicketRejected("x", reason="TICKET_INCARNATION"), 1), (TicketRejected("x"), 0)],
)
def test_a_peer_that_is_gone_is_forgotten_one_that_refuses_is_not(error: Exception, forgotten: int) -> None:
    script = Script()
    script.fail["claim"] = error
    fetcher = start(script)
    assert outcome(script).failure is not None
    assert script.forgotten == forgotten
    fetcher._pool.shutdown()


def test_pages_are_handed_over_only_in_ready_and_failed() -> None:
    assert TRANSFER_MACHINE.final == {TransferState.READY, TransferState.FAILED}
    into_failed = {state for (state, _), to in TRANSFER_MACHINE.table.items() if to is TransferState.FAILED}
    nothing_in_flight = {TransferState.QUEUED, TransferState.CONNECTING, TransferState.CLAIMING}
    assert into_failed == {*nothing_in_flight, TransferState.DRAINING}, "a running read must drain before it fails"


def test_the_deadline_depends_on_the_number_of_bytes() -> None:
    times = TransferTimes(min_seconds=0.25, slack=4, assumed_bytes_per_second=1e6)
    assert times.deadline_seconds(10) == 0.25
    assert times.deadline_seconds(1_000_000) == 4.0


def test_a_ticket_has_the_identity_of_its_peer() -> None:
    assert a_ticket().peer == ("w", Incarnation("i"))


OTHER = KvLayout("digest", "float32", 1, 1, 4, 6)
"""12 tokens in two blocks."""


class Raw(Script):
    """A script whose peer has pages of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[memoryview] = []
        self.epochs = {5: 50, 6: 60}

    def staging(self, num_bytes: int) -> memoryview:
        self.places.append(memoryview(bytearray(num_bytes)))
        return self.places[-1]

    def read_raw(self, peer: Peer, remote: Sequence[int], into: memoryview) -> Read:
        self._step("read")
        self.reads.append((list(remote), [len(into)]))
        into[:] = b"\x01" * len(into)
        return self


def other_ticket() -> Ticket:
    return Ticket(
        "t",
        "w",
        "i",
        "peer:1",
        "scripted",
        OTHER.fingerprint,
        "",
        b"",
        12,
        (5, 6),
        (50, 60),
        0.0,
        layout=OTHER.description,
    )


def start_raw(script: Raw, pages: bytearray, *, max_parallel: int = 1) -> Fetcher:
    fetcher = Fetcher(
        script,  # type: ignore[arg-type]
        script,
        LAYOUT,
        script.hear,
        clock=script.clock,
        times=TransferTimes(min_seconds=1.0),
        pages=memoryview(pages),
        max_parallel=max_parallel,
    )
    fetcher.start(1, RequestId("r"), FetchSource(other_ticket(), 1), 1, [BlockId(2), BlockId(0)])
    return fetcher


def test_pages_of_another_layout_are_read_by_position_and_converted() -> None:
    script, pages = Raw(), bytearray(4 * LAYOUT.block_bytes)
    fetcher = start_raw(script, pages)
    got = outcome(script)
    assert (got.failure, got.num_blocks) == (None, 2)
    assert script.reads == [([5, 6], [2 * OTHER.block_bytes])], "tokens 4 to 11 are in both of the peer's blocks"
    size = LAYOUT.block_bytes
    assert [set(pages[i * size : (i + 1) * size]) for i in range(4)] == [{1}, {0}, {1}, {0}]
    assert fetcher._staging.num_lent == 0
    fetcher._pool.shutdown()
    assert script.finished == [True]


def test_the_epochs_of_all_source_blocks_count() -> None:
    for block in (5, 6):
        script = Raw()
        script.epochs[block] += 1
        fetcher = start_raw(script, bytearray(4 * LAYOUT.block_bytes))
        assert "reused" in str(outcome(script).failure)
        assert fetcher._staging.num_lent == 0
        fetcher._pool.shutdown()


def test_a_stalled_read_keeps_its_place_in_staging_until_it_is_quiet() -> None:
    script, pages = Raw(), bytearray(4 * LAYOUT.block_bytes)
    script.polls_until_done, script.seconds_per_poll = 1 << 30, 0.4
    script.quiet.clear()
    fetcher = start_raw(script, pages)
    (early,) = script.wait_for(1)
    assert isinstance(early, LoadOutcome)
    assert early.failure is not None
    assert fetcher._staging.num_lent == 1
    script.polls_until_done, script.seconds_per_poll = 1, 0.0
    fetcher.start(2, RequestId("s"), FetchSource(other_ticket(), 1), 0, [BlockId(1)])
    _, other, quiet = script.wait_for(3)
    assert isinstance(other, LoadOutcome)
    assert (other.failure, quiet) == (None, PagesQuiet(2))
    assert len(script.places) == 2, "the transport may still write to the slot of the stalled read"
    script.quiet.set()
    assert script.wait_for(4)[-1] == PagesQuiet(1)
    assert fetcher._staging.num_lent == 0
    fetcher._pool.shutdown()


def test_a_read_that_fails_at_its_start_frees_its_place() -> None:
    script = Raw()
    script.fail["read"] = ReadError("broken wire")
    fetcher = start_raw(script, bytearray(4 * LAYOUT.block_bytes))
    assert outcome(script).failure == "broken wire"
    assert fetcher._staging.num_lent == 0
    fetcher._pool.shutdown()


def test_a_fetcher_without_pages_converts_nothing() -> None:
    script = Raw()
    fetcher = start(script, ticket=other_ticket(), first_block=0, num_blocks=3)
    assert "cannot convert pages" in str(outcome(script).failure)
    fetcher._pool.shutdown()


def test_a_ticket_of_other_weights_fails_its_load_and_reads_nothing() -> None:
    """The weights may change between the check of a ticket and its fetch."""
    script = Script()
    fetcher = Fetcher(script, script, LAYOUT, script.hear, clock=script.clock)  # type: ignore[arg-type]
    fetcher.use_layout(replace(LAYOUT, model_digest="new"))
    fetcher.start(1, RequestId("r"), FetchSource(a_ticket(), 1), 0, [BlockId(20)])
    outcome, quiet = script.messages
    assert isinstance(outcome, LoadOutcome)
    assert "differs from this worker's" in (outcome.failure or "")
    assert quiet == PagesQuiet(1)
    assert (script.reads, script.described) == ([], 0)
    fetcher.close()
