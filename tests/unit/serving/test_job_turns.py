"""Turns of jobs: no owner waits behind all jobs of another, nor is refused because of them."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import Overloaded
from kvferry.serving.job_turns import JobTurns
from kvferry.serving.request import Caller, ClientIdentity


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Jobs:
    """Jobs that wait for turns; each runs until it is told to end."""

    def __init__(self, max_jobs: int) -> None:
        self.turns = JobTurns(max_jobs, "prompt")
        self.go = asyncio.Event()
        self.begun: list[str] = []
        self.tasks: list[tuple[str, asyncio.Task[None]]] = []

    async def add(self, *owners: str) -> None:
        for owner in owners:
            self.tasks.append((owner, asyncio.create_task(self._run(owner))))
            await settled()

    async def _run(self, owner: str) -> None:
        turn = await self.turns.enter(owner, 0)
        try:
            self.begun.append(owner)
            await self.go.wait()
        finally:
            self.turns.leave(turn)

    async def outcomes(self) -> Counter[tuple[str, str]]:
        """Let all jobs run; return how many of each owner ran and were refused."""
        self.go.set()
        await asyncio.gather(*(task for _, task in self.tasks), return_exceptions=True)
        errors = [(owner, task.exception()) for owner, task in self.tasks]
        assert all(error is None or isinstance(error, Overloaded) for _, error in errors)
        return Counter((owner, "ran" if error is None else "refused") for owner, error in errors)


async def test_one_owner_may_use_all_room() -> None:
    jobs = Jobs(4)
    await jobs.add(*"aaaaaa")
    assert await jobs.outcomes() == {("a", "ran"): 4, ("a", "refused"): 2}


async def test_another_owner_displaces_the_newest_jobs_of_the_largest() -> None:
    jobs = Jobs(6)
    await jobs.add(*"aaaaaa", *"bbbb")
    assert [task.done() for owner, task in jobs.tasks if owner == "a"] == [False] * 4 + [True] * 2, "the newest"
    assert await jobs.outcomes() == {("a", "ran"): 4, ("a", "refused"): 2, ("b", "ran"): 2, ("b", "refused"): 2}
    assert jobs.begun[:2] == ["a", "b"], "the next turn is that of the other owner"


async def test_a_job_that_runs_is_never_displaced() -> None:
    jobs = Jobs(1)
    await jobs.add("a", "b")
    assert await jobs.outcomes() == {("a", "ran"): 1, ("b", "refused"): 1}


async def test_a_caller_that_leaves_at_its_turn_passes_it_on() -> None:
    jobs = Jobs(4)
    await jobs.add(*"abc")
    jobs.tasks[1][1].cancel()
    jobs.tasks[0][1].cancel()
    await settled()
    assert jobs.begun == ["a", "c"]
    jobs.go.set()
    await jobs.tasks[2][1]


async def test_a_waiter_that_is_cancelled_as_its_turn_comes_is_passed_over() -> None:
    turns = JobTurns(4, "prompt")
    first = await turns.enter("a", 0)
    gone, next_one = (asyncio.create_task(turns.enter(owner, 0)) for owner in "bc")
    await settled()
    gone.cancel()
    turns.leave(first)  # before the cancelled task has run
    turns.leave(await next_one)
    with pytest.raises(asyncio.CancelledError):
        await gone
    turns.leave(await turns.enter("d", 0))


async def test_new_owners_do_not_keep_an_earlier_one_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    turns = JobTurns(8, "prompt")
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    order: list[str] = []

    async def job(owner: str) -> None:
        nonlocal now
        turn = await turns.enter(owner, 0)
        order.append(owner)
        await settled()
        now += 1.0
        turns.leave(turn)

    tasks = [asyncio.create_task(job(owner)) for owner in ("new0", "victim", "new1", "victim")]
    for number in range(2, 20):  # another new owner with each job
        await settled()
        tasks.append(asyncio.create_task(job(f"new{number}")))
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert [number for number, owner in enumerate(order) if owner == "victim"][-1] <= 8, order


async def test_owners_that_have_gone_are_forgotten_while_others_wait() -> None:
    turns = JobTurns(4, "prompt")
    running = await turns.enter("first", 0)
    for number in range(200):
        waiting = asyncio.create_task(turns.enter(f"owner{number}", 0))
        await settled()
        turns.leave(running)
        running = await waiting
        assert len(turns._seconds) <= 8
    turns.leave(running)
    assert turns._seconds == {}


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(bounded())


@given(max_jobs=st.integers(2, 8), owners=st.lists(st.sampled_from("abc"), min_size=1, max_size=24))
def test_an_owner_below_its_share_is_not_refused(max_jobs: int, owners: list[str]) -> None:
    async def scenario() -> None:
        jobs = Jobs(max_jobs)
        await jobs.add(*owners)
        done = await jobs.outcomes()
        assert sum(count for (_, outcome), count in done.items() if outcome == "ran") == min(max_jobs, len(owners))
        share = (max_jobs - 1) // 3  # the running job of another owner cannot give way
        for owner, asked in Counter(owners).items():
            assert done[owner, "ran"] >= min(share, asked)

    run(scenario)


@pytest.mark.parametrize(
    ("client", "owner"),
    [
        (ClientIdentity("team", "10.0.0.1"), "team"),
        (ClientIdentity("", "10.0.0.1"), "address 10.0.0.1"),
        (ClientIdentity("", "2a00:1450:1:2:3::4"), "address 2a00:1450:1:2::/64"),
        (ClientIdentity("", "2a00:1450:1:2:ffff::"), "address 2a00:1450:1:2::/64"),
        (ClientIdentity("", "::ffff:10.0.0.1"), "address 10.0.0.1"),
        (ClientIdentity("", "64:ff9b::a00:1"), "address 64:ff9b::a00:1"),
        (ClientIdentity("", "::1"), "address ::1"),
        (ClientIdentity("", "fd00::1"), "address fd00::1"),
        (ClientIdentity("", "client.example"), "address client.example"),
        (ClientIdentity(), "address "),
    ],
)
def test_a_client_without_a_tenant_is_known_by_its_network(client: ClientIdentity, owner: str) -> None:
    assert client.owner == owner
    assert Caller("r", client.tenant, address=client.address).client == client  # type: ignore[arg-type]
