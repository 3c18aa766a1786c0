"""The offer desk: contents of tickets, unique ids, and pages that are released exactly once."""

import asyncio

import pytest
from harness.fakes.engines import an_engine

from kvferry.core.clock import ManualClock
from kvferry.core.errors import TicketRejected
from kvferry.core.ids import BlockId, Incarnation, TicketId, WorkerId, new_incarnation, new_ticket_id
from kvferry.engine.loop.engine_loop import CommandQueue, EngineLoop
from kvferry.engine.schedule.step.kv_jobs import Export
from kvferry.kv.handoff.offers import OfferState, OfferTimes
from kvferry.kv.interface.ticket import Keyring, digest_tokens
from kvferry.kv.pages.layout import KvLayout
from kvferry.kv.registry import open_transport
from kvferry.workers.calls.context import UnitIdentity, WorkerContext
from kvferry.workers.handoff import offer_desk
from kvferry.workers.handoff.offer_desk import OfferDesk

LAYOUT = KvLayout("digest", "float32", num_layers=2, num_kv_heads=1, head_dim=4, block_tokens=4)
TIMES = OfferTimes(offer_seconds=10, lease_seconds=30, quiesce_seconds=5)
KEYRING = Keyring([b"k" * 16])
EXPORT = Export((BlockId(3), BlockId(5)), (7, 8), 6)
TOKENS = [1, 2, 3, 4, 5, 6]


class RecordingLoop(EngineLoop):
    """An engine loop that records released exports; its thread is not started."""

    def __init__(self) -> None:
        super().__init__(an_engine()[0], CommandQueue(), name="never started", on_failure=lambda _: None)
        self.released: list[int] = []
        self.change = asyncio.Event()

    def release_export(self, number: int) -> None:
        self.released.append(number)
        self.change.set()


class Desk:
    """An offer desk with its clock, loop and helpers for the test."""

    def __init__(self) -> None:
        self.clock, self.loop = ManualClock(), RecordingLoop()
        context = WorkerContext(
            unit=UnitIdentity(Incarnation("life-1"), WorkerId("p-0"), "127.0.0.1:7"),
            role="prefill",
            model="m",
            layout=LAYOUT,
            connector="memory",
            domain="",
            max_model_tokens=64,
            loop=self.loop,
            clock=self.clock,
        )
        self.desk = OfferDesk(context, KEYRING, TIMES, open_transport("memory", new_incarnation()))

    def offer(self, number: int, own_id: TicketId | None = None) -> TicketId:
        return self.desk.offer(number, EXPORT, TOKENS, "tenant", own_id).ticket_id


@pytest.fixture
async def at() -> Desk:
    return Desk()


async def test_the_ticket_names_the_owner_the_epochs_and_the_expiry_of_the_pages(at: Desk) -> None:
    at.clock.advance(3.0)
    offered = at.desk.offer(1, EXPORT, TOKENS, "tenant")
    ticket = KEYRING.open(offered.sealed)
    assert ticket.id == offered.ticket_id
    assert ticket.peer == ("p-0", "life-1")
    assert (ticket.control_address, ticket.connector) == ("127.0.0.1:7", "memory")
    assert (ticket.fingerprint, ticket.scope) == (LAYOUT.fingerprint, "tenant")
    assert ticket.tokens_digest == digest_tokens(TOKENS)
    assert (ticket.block_ids, ticket.epochs, ticket.num_tokens) == ((3, 5), (7, 8), 6)
    assert ticket.expires_wall == at.clock.wall() + TIMES.offer_seconds


async def test_the_caller_chooses_the_id_of_its_offer(at: Desk) -> None:
    own_id = new_ticket_id()
    offered = at.desk.offer(1, EXPORT, TOKENS, "", own_id)
    assert offered.ticket_id == own_id == KEYRING.open(offered.sealed).id


async def test_an_id_that_another_offer_has_is_replaced_and_both_offers_live(at: Desk) -> None:
    own_id = new_ticket_id()
    first, second = at.offer(1, own_id), at.offer(2, own_id)
    assert first == own_id != second
    at.desk.release(second)
    assert at.loop.released == [2]
    at.desk.release(first)
    assert at.loop.released == [2, 1]
    assert at.desk.is_idle


async def test_an_id_is_free_again_when_its_offer_has_ended(at: Desk) -> None:
    own_id = at.offer(1)
    at.desk.release(own_id)
    assert at.offer(2, own_id) == own_id


async def test_offers_without_a_requested_id_have_unique_ids(at: Desk) -> None:
    assert len({at.offer(number) for number in range(50)}) == 50
    assert at.desk.count(OfferState.OFFERED) == 50


async def test_a_reader_claims_renews_and_finishes_and_the_pages_are_released_once(at: Desk) -> None:
    ticket = at.offer(1)
    assert at.desk.claim(ticket, 1) == TIMES.lease_seconds
    assert at.desk.count(OfferState.CLAIMED) == 1
    at.clock.advance(20)
    assert at.desk.renew(ticket, 1) == TIMES.lease_seconds
    at.desk.finish(ticket, 1, done=True)
    at.desk.finish(ticket, 1, done=True)
    at.desk.release(ticket)
    assert at.loop.released == [1]
    with pytest.raises(TicketRejected):
        at.desk.renew(ticket, 1)


async def test_a_release_that_overtakes_its_offer_frees_the_pages_at_once(at: Desk) -> None:
    own_id = TicketId("ab" * 16)
    at.desk.release(own_id)
    at.offer(1, own_id)
    assert at.loop.released == [1]
    assert at.desk.is_idle


async def test_unclaimed_offers_expire(at: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offer_desk, "_TICK_SECONDS", 0.0)
    old = at.offer(1)
    at.clock.advance(TIMES.offer_seconds - 1)
    young = at.offer(2)
    ticking = asyncio.create_task(at.desk.run())
    at.clock.advance(1.0)
    async with asyncio.timeout(30):
        await at.loop.change.wait()
    assert at.loop.released == [1]
    with pytest.raises(TicketRejected):
        at.desk.claim(old, 1)
    assert at.desk.claim(young, 1)
    ticking.cancel()
    await asyncio.gather(ticking, return_exceptions=True)


async def test_the_end_releases_all_offers_claimed_or_not(at: Desk) -> None:
    ticking = asyncio.create_task(at.desk.run())
    at.offer(1)
    at.desk.claim(at.offer(2), 1)
    await asyncio.sleep(0)  # lets the task start
    ticking.cancel()
    await asyncio.gather(ticking, return_exceptions=True)
    assert sorted(at.loop.released) == [1, 2]
    assert at.desk.is_idle
