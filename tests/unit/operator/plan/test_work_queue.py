"""The work queue of pools: each is queued and processed once at a time, none is lost, failures are delayed."""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.operator.plan.process.work_queue import WorkQueue


def queue() -> WorkQueue[str]:
    return WorkQueue(jitter=lambda: 0.5)


def test_first_due_first_out_and_each_once():
    line = queue()
    for key, at in (("a", 3.0), ("b", 1.0), ("b", 2.0), ("a", 0.5)):
        line.add(key, at)
    assert line.next_at() == 0.5
    assert [line.take(5.0) for _ in range(3)] == ["a", "b", None]


def test_a_key_is_not_due_before_its_time():
    line = queue()
    line.add("a", 2.0)
    assert line.take(1.9) is None
    assert line.take(2.0) == "a"
    assert line.next_at() is None


def test_an_event_during_a_pass_causes_another_pass():
    line = queue()
    line.add("a", 0.0)
    line.take(0.0)
    line.add("a", 1.0)
    assert line.take(1.0) is None
    line.done("a", 2.0, 100.0)
    assert line.take(2.0) == "a"
    line.done("a", 3.0, None)
    assert line.num_waiting(1e9) == 0


def test_failures_wait_longer_each_time_and_a_success_forgets_them():
    line = queue()
    line.add("a", 0.0)
    waits = []
    for _ in range(12):
        line.take(1e9)
        line.add("a", 0.0)  # an event does not shorten the delay
        waits.append(line.failed("a", 0.0))
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0]
    assert waits[-1] == 120.0
    line.take(1e9)
    line.done("a", 0.0, 5.0)
    line.take(1e9)
    assert line.failed("a", 0.0) == 0.5
    line.forget("a")


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["add", "take", "done", "fail"])), max_size=60))
def test_a_key_is_processed_once_at_a_time_and_never_lost(steps):
    line, at_work, wanted = queue(), set(), set()
    now = 0.0
    for key, what in steps:
        now += 1000.0
        if what == "add":
            line.add(key, now)
            wanted.add(key)
        elif what == "take":
            taken = line.take(now)
            if taken is not None:
                assert taken not in at_work
                at_work.add(taken)
                wanted.discard(taken)
        elif key in at_work:
            at_work.remove(key)
            if what == "done":
                line.done(key, now, None)
            else:
                line.failed(key, now)
                wanted.add(key)
    for key in at_work:
        line.done(key, now, None)
    left = set()
    while (key := line.take(1e12)) is not None:
        left.add(key)
    assert left == wanted
