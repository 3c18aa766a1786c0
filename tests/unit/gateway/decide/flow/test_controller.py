"""The flow controller: bounds, shedding by class, capacity, and exactly one end for each request."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.core.errors import InvariantBroken, Overloaded
from kvferry.gateway.decide.flow.capacity import CLOSED, Room
from kvferry.gateway.decide.flow.controller import FlowController, QueueBounds
from kvferry.gateway.decide.flow.fair_queue import MACHINE, EntryEvent, EntryState, QueueEntry

OPEN = Room()
TOTAL = QueueBounds(6, 60)
OWN = QueueBounds(4, 40)
UNLIMITED = QueueBounds(1000, 1 << 20)


def entry(tenant: str = "a", priority: int = 0, cost: float = 10.0, **fields: float) -> QueueEntry:
    return QueueEntry(tenant, priority, cost, **fields)  # type: ignore[arg-type]


def queued(controller: FlowController, one: QueueEntry, own: QueueBounds = UNLIMITED, now: float = 0.0) -> QueueEntry:
    controller.make_room(one, own, now)
    controller.submit(one, now)
    return one


class Traffic(RuleBasedStateMachine):
    """Arrivals, departures and capacity in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.controller = FlowController(TOTAL)
        self.now = 0.0
        self.all: list[QueueEntry] = []
        self.ends: dict[int, list[str]] = {}

    def of(self, state: EntryState) -> list[QueueEntry]:
        return [one for one in self.all if one.state is state]

    def requests(self, state: EntryState) -> list[QueueEntry]:
        return [one for one in self.of(state) if not one.is_part]

    @rule(
        tenant=st.sampled_from("abc"),
        priority=st.sampled_from([-1, 0, 4]),
        cost=st.integers(1, 50),
        num_bytes=st.integers(0, 30),
        sequences=st.integers(1, 3),
        is_search=st.booleans(),
        life=st.one_of(st.just(math.inf), st.floats(0, 5)),
    )
    def arrive(self, tenant, priority, cost, num_bytes, sequences, is_search, life):
        one = QueueEntry(
            tenant,
            priority,
            cost,
            is_search=is_search,
            prefill_tokens=cost,
            num_bytes=num_bytes,
            deadline=self.now + life,
            num_sequences=sequences,
        )
        self.all.append(one)
        before = {id(other) for other in self.of(EntryState.QUEUED)}  # further samples are never displaced
        try:
            victims = self.controller.make_room(one, OWN, self.now)
        except Overloaded:
            assert {id(other) for other in self.of(EntryState.QUEUED)} == before, (
                "a refused request displaces no other request"
            )
            return
        assert all(victim.priority > priority and not victim.is_part for victim in victims)
        assert len({victim.number for victim in victims}) == len(victims)
        self.controller.submit(one, self.now)

    @rule(
        sequences=st.integers(0, 6),
        searches=st.integers(0, 6),
        is_split=st.booleans(),
        tokens=st.integers(0, 120),
        streams=st.integers(0, 8),
    )
    def dispatch(self, sequences, searches, is_split, tokens, streams):
        controller = self.controller
        before, beams = controller.num_sequences, controller.num_beams
        decided = controller.dispatch(Room(sequences, searches, is_split, tokens, streams), self.now)
        gone = [one for one in decided if one.state is EntryState.DISPATCHED]
        assert all(one.deadline > self.now for one in gone)
        assert all(one.state is EntryState.EXPIRED for one in decided if one.deadline <= self.now)
        for kind, used, bound in ((False, before, sequences), (True, beams, searches)):
            if own := [one for one in gone if one.is_search is kind]:
                most = used + sum(one.num_sequences for one in own)
                assert most - own[-1].num_sequences < bound, "each request was dispatched while there was room"
        if gone:
            most = before + beams + sum(one.num_sequences for one in gone)
            assert most <= streams or (before + beams == 0 and len(gone) == 1)

    @precondition(lambda self: self.of(EntryState.DISPATCHED))
    @rule(data=st.data(), used=st.floats(0, 100))
    def finish(self, data, used):
        self.controller.finish(data.draw(st.sampled_from(self.of(EntryState.DISPATCHED))), used)

    @precondition(lambda self: self.requests(EntryState.DISPATCHED))
    @rule(data=st.data(), cost=st.integers(1, 50), rank=st.integers(0, 3))
    def further_sample(self, data, cost, rank):
        of = data.draw(st.sampled_from(self.requests(EntryState.DISPATCHED)))
        one = QueueEntry(of.tenant, of.priority, cost, is_part=True, deadline=of.deadline, rank=rank)
        self.all.append(one)
        self.controller.submit(one, self.now)

    @precondition(lambda self: self.of(EntryState.QUEUED))
    @rule(data=st.data(), rank=st.integers(0, 3))
    def rerank(self, data, rank):
        self.controller.rerank(data.draw(st.sampled_from(self.of(EntryState.QUEUED))), rank)

    @precondition(lambda self: self.of(EntryState.DISPATCHED))
    @rule(data=st.data())
    def give_back(self, data):
        one = data.draw(st.sampled_from(self.of(EntryState.DISPATCHED)))
        self.controller.give_back(one)
        assert one.num_sequences == 0

    @precondition(lambda self: self.of(EntryState.DISPATCHED))
    @rule(data=st.data(), tokens=st.integers(0, 60))
    def prefilled(self, data, tokens):
        self.controller.prefilled(data.draw(st.sampled_from(self.of(EntryState.DISPATCHED))), tokens)

    @precondition(lambda self: self.of(EntryState.QUEUED))
    @rule(data=st.data(), how=st.sampled_from(["cancel", "expire", "refuse"]))
    def leave(self, data, how):
        getattr(self.controller, how)(data.draw(st.sampled_from(self.of(EntryState.QUEUED))))

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds):
        self.now += seconds

    @invariant()
    def bounds_hold_and_counts_agree(self):
        waiting, running = self.requests(EntryState.QUEUED), self.of(EntryState.DISPATCHED)
        controller = self.controller
        assert controller.is_waited_for == bool(self.of(EntryState.QUEUED))
        assert controller.num_queued == len(waiting) <= TOTAL.requests
        assert controller.queued_bytes == sum(one.num_bytes for one in waiting) <= TOTAL.num_bytes
        for tenant in "abc":
            own = [one for one in waiting if one.tenant == tenant]
            size = controller.by_tenant.get(tenant)
            assert (len(own), sum(one.num_bytes for one in own)) == (
                (size.requests, size.num_bytes) if size else (0, 0)
            )
            assert len(own) <= OWN.requests
            assert sum(one.num_bytes for one in own) <= OWN.num_bytes
        assert sum(size.requests for size in controller.by_band.values()) == len(waiting)
        assert controller.num_dispatched == len(self.requests(EntryState.DISPATCHED))
        assert controller.num_sequences == sum(one.num_sequences for one in running if not one.is_search)
        assert controller.num_beams == sum(one.num_sequences for one in running if one.is_search)
        assert controller.prefill_tokens == sum(one.open_prefill_tokens for one in running) >= 0
        assert not self.of(EntryState.NEW), "a request is neither queued nor ended"

    def teardown(self):
        """End all requests; check that each has one final state and that the controller is idle."""
        for one in self.of(EntryState.DISPATCHED):
            self.controller.finish(one, 1.0)
        while self.controller.is_waited_for:
            assert self.controller.dispatch(OPEN, self.now)
            for one in self.of(EntryState.DISPATCHED):
                self.controller.finish(one, 1.0)
        assert all(one.state in MACHINE.final for one in self.all)
        assert (self.controller.num_dispatched, self.controller.num_sequences, self.controller.num_beams) == (0, 0, 0)
        assert (self.controller.prefill_tokens, self.controller.num_flows) == (0, 0)


Traffic.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_traffic = Traffic.TestCase


def test_with_room_a_request_passes_at_once():
    controller = FlowController(TOTAL)
    one = queued(controller, entry())
    assert controller.dispatch(OPEN, 0.0) == [one]
    assert (one.state, controller.num_queued) == (EntryState.DISPATCHED, 0)


@pytest.mark.parametrize(
    "room",
    [CLOSED, Room(sequences=1), Room(prefill_tokens=10), Room(streams=1)],
    ids=["closed", "full", "prefill", "streams"],
)
def test_without_room_a_request_stays_queued(room):
    controller = FlowController(TOTAL)
    if room is not CLOSED:
        queued(controller, entry(prefill_tokens=10))
        assert len(controller.dispatch(OPEN, 0.0)) == 1
    one = queued(controller, entry())
    assert controller.dispatch(room, 0.0) == []
    assert one.state is EntryState.QUEUED
    assert controller.dispatch(OPEN, 0.0) == [one]


def test_searches_beyond_their_room_delay_no_other_request():
    controller, room = FlowController(UNLIMITED), Room(sequences=8, searches=8, is_split=True)
    searches = [queued(controller, entry(num_sequences=8, is_search=True)) for _ in range(3)]
    other = queued(controller, entry(priority=5))
    assert controller.dispatch(room, 0.0) == [searches[0], other]
    assert controller.used(room) == 1, "with prefill and decode workers, beams take no place of a decode worker"
    controller.finish(searches[0], 1.0)
    assert controller.dispatch(room, 0.0) == [searches[1]]


def test_searches_leave_half_of_the_workers_of_both_roles_to_others():
    controller, room = FlowController(UNLIMITED), Room(sequences=8, searches=4)
    searches = [queued(controller, entry(num_sequences=4, is_search=True)) for _ in range(3)]
    others = [queued(controller, entry()) for _ in range(6)]
    assert controller.dispatch(room, 0.0) == [searches[0], *others[:4]]
    assert controller.used(room) == 8
    controller.finish(searches[0], 1.0)
    assert controller.dispatch(room, 0.0) == [searches[1]], "the earliest arrival of either kind is next"
    assert controller.dispatch(room, 0.0) == []


def test_a_request_waits_for_its_streams_without_being_overtaken():
    controller, room = FlowController(UNLIMITED), Room(streams=8)
    running = [queued(controller, entry()) for _ in range(4)]
    assert controller.dispatch(room, 0.0) == running
    search = queued(controller, entry(num_sequences=8, is_search=True))
    others = [queued(controller, entry()) for _ in range(3)]
    assert controller.dispatch(room, 0.0) == [], "the other requests arrived later"
    for one in running:
        controller.finish(one, 1.0)
    assert controller.dispatch(room, 0.0) == [search]
    controller.finish(search, 1.0)
    assert controller.dispatch(room, 0.0) == others


def test_weights_of_priorities_count_between_searches_and_others():
    controller, room = FlowController(UNLIMITED, {0: 3, 5: 1}), Room(prefill_tokens=1)
    for _ in range(8):
        queued(controller, entry(priority=0))
        queued(controller, entry(priority=5, is_search=True))
    order = []
    for _ in range(8):
        (one,) = controller.dispatch(room, 0.0)
        order.append(one.priority)
        controller.finish(one, one.cost)
    assert order.count(5) == 2, order


def test_a_request_displaces_the_lowest_class_of_either_kind():
    controller = FlowController(QueueBounds(3, 1000))
    search, other = entry(priority=7, is_search=True), entry(priority=4)
    newer = entry(priority=7)
    for one in (search, other, newer):
        queued(controller, one)
    assert controller.make_room(entry(priority=0), UNLIMITED, 0.0) == [newer]


def test_computed_prompts_make_room_for_further_ones():
    controller, room = FlowController(TOTAL), Room(prefill_tokens=10)
    first = queued(controller, entry(prefill_tokens=10))
    second = queued(controller, entry())
    assert controller.dispatch(room, 0.0) == [first]
    controller.prefilled(first, 4)
    assert controller.dispatch(room, 0.0) == [second]


def test_a_request_larger_than_the_limit_of_streams_is_dispatched_alone():
    controller, room = FlowController(TOTAL), Room(streams=2)
    small, large = queued(controller, entry()), queued(controller, entry(num_sequences=3))
    assert controller.dispatch(room, 0.0) == [small]
    controller.finish(small, 1.0)
    assert controller.dispatch(room, 0.0) == [large]


def test_a_full_queue_refuses_its_own_class_with_a_retry_time():
    controller = FlowController(QueueBounds(2, 100))
    for number in range(20):
        controller.finish(_passed(controller, now=number / 10), 1.0)
    queued(controller, entry(), now=2.0)
    queued(controller, entry(), now=2.0)
    with pytest.raises(Overloaded, match="the queue is full: 2 requests are waiting; at most 2 may") as full:
        queued(controller, entry(), now=2.0)
    assert full.value.reason == "RATE_LIMIT_EXCEEDED"
    assert full.value.retry_after_seconds == 1.0, (
        "10 requests leave per second, so the time for one is below the minimum of 1 s"
    )


def _passed(controller: FlowController, now: float) -> QueueEntry:
    one = queued(controller, entry(), now=now)
    assert controller.dispatch(OPEN, now) == [one]
    return one


def test_a_higher_class_takes_the_place_of_the_newest_of_the_lowest():
    controller = FlowController(QueueBounds(3, 100))
    old, low, new = (queued(controller, entry(priority=p)) for p in (5, 1, 5))
    urgent = queued(controller, entry(priority=-1))
    assert [one.state.value for one in (old, low, new, urgent)] == ["queued", "queued", "refused", "queued"]
    queued(controller, entry(priority=0))
    assert (old.state, low.state) == (EntryState.REFUSED, EntryState.QUEUED)


def test_a_tenant_at_its_own_bound_displaces_only_its_own():
    controller = FlowController(QueueBounds(10, 1000))
    other = queued(controller, entry("b", priority=9))
    own = [queued(controller, entry("a", priority=5), QueueBounds(2, 1000)) for _ in range(2)]
    queued(controller, entry("a", priority=0), QueueBounds(2, 1000))
    assert [one.state for one in (other, *own)] == [EntryState.QUEUED, EntryState.QUEUED, EntryState.REFUSED]
    with pytest.raises(Overloaded, match="of tenant 'a' is full"):
        queued(controller, entry("a", priority=9), QueueBounds(2, 1000))


def test_bytes_are_bounded_too_and_several_may_be_displaced():
    controller = FlowController(QueueBounds(10, 100))
    small = [queued(controller, entry(priority=5, num_bytes=30)) for _ in range(3)]
    with pytest.raises(
        Overloaded, match="90 bytes of requests are waiting, and 101 more would exceed the limit of 100"
    ):
        queued(controller, entry(priority=0, num_bytes=101))
    assert all(one.state is EntryState.QUEUED for one in small)
    queued(controller, entry(priority=0, num_bytes=60))
    assert [one.state.value for one in small] == ["queued", "refused", "refused"]


def test_an_expired_request_is_not_dispatched():
    controller = FlowController(TOTAL)
    late = queued(controller, entry(deadline=5.0))
    good = queued(controller, entry(deadline=50.0))
    assert controller.dispatch(OPEN, 5.0) == [late, good]
    assert (late.state, good.state) == (EntryState.EXPIRED, EntryState.DISPATCHED)


def test_an_ended_request_cannot_end_again():
    controller = FlowController(TOTAL)
    one = _passed(controller, 0.0)
    controller.finish(one, 1.0)
    with pytest.raises(InvariantBroken, match="illegal in state 'ended'"):
        controller.finish(one, 1.0)
    with pytest.raises(InvariantBroken):
        one.on(EntryEvent.QUEUE)


def test_a_request_displaced_for_its_tenant_is_not_displaced_again_for_all():
    """Both bounds are exceeded. The victim for the tenant's bound is chosen first, and the bound of all tenants needs
    one more.
    """
    controller = FlowController(QueueBounds(10, 100))
    other = queued(controller, entry("b", priority=9, num_bytes=50))
    own = queued(controller, entry("a", priority=9, num_bytes=50))
    queued(controller, entry("a", priority=0, num_bytes=80), QueueBounds(10, 90))
    assert [one.state for one in (other, own)] == [EntryState.REFUSED, EntryState.REFUSED]
    assert (controller.num_queued, controller.queued_bytes) == (1, 80)
