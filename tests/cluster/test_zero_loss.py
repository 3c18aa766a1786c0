"""A constant stream of requests during rollouts, scaling and kills of a pool: none is lost, and none has a wrong
answer. `python -m harness.pools` writes the table of docs/operations.md from the measurements of the whole run.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness import machine
from harness.pools import table
from harness.pools.load import CLOCK, Load, Outcome, Question, questions
from harness.pools.on_node import MODEL, PoolOnNode, eventually
from harness.pools.table import Row

from kvferry.engine import LLM

pytestmark = [pytest.mark.cluster, pytest.mark.node, pytest.mark.timeout(900)]

OPERATORS = "kvferry"
SMALL = {
    "spec": {
        # Shorter than the defaults, so that the events fit a test; their order is the same.
        "drain": {"seconds": 15, "lingerSeconds": 3},
        "connector": {"type": "tcp"},
    }
}


@pytest.fixture(scope="module")
def question_list() -> list[Question]:
    return questions(LLM(MODEL, dtype="float32", kv_memory=128 << 20))


@pytest.fixture(scope="module")
def pool(operated: Any, say: Callable[[str], None], question_list: list[Question]) -> Iterator[PoolOnNode]:
    namespace = "zero-loss"
    operated.kubectl("create", "namespace", namespace)
    made = PoolOnNode(operated.cluster, namespace)
    made.apply(SMALL)
    made.wait_ready()
    say("the pool is ready")
    yield made
    operated.kubectl("delete", "namespace", namespace, "--wait=false")


def replicas(pool: PoolOnNode, role: str, count: int) -> None:
    at = next(i for i, one in enumerate(pool.get()["spec"]["roles"]) if one["name"] == role)
    pool.patch({"op": "add", "path": f"/spec/roles/{at}/replicas", "value": count})


def budget(pool: PoolOnNode, tokens: int, *, rollback: str = "") -> None:
    """Change the template of both roles in a way that does not affect answers."""
    pool.patch(
        *({"op": "add", "path": f"/spec/roles/{at}/engine/tokenBudget", "value": tokens} for at in (0, 1)),
        {"op": "add", "path": "/spec/rollout", "value": {"rollbackTo": rollback}},
    )


def scale_out(pool: PoolOnNode) -> None:
    replicas(pool, "decode", 2)
    pool.wait_ready()


def scale_in(pool: PoolOnNode) -> None:
    if len(pool.pods("decode")) < 2:
        scale_out(pool)
    victims = set(pool.pods("decode"))
    replicas(pool, "decode", 1)
    pool.wait_ready()
    pool.wait_pods("decode", 1)
    (gone,) = victims - set(pool.pods("decode"))
    pool.settled_away(gone)


def rolling_update(pool: PoolOnNode) -> None:
    before = pool.get()["status"]["revision"]
    budget(pool, 1000)
    assert pool.wait_ready()["status"]["revision"] != before


def rollback(pool: PoolOnNode) -> None:
    now = pool.get()["status"]["revision"]
    kept = pool.kubectl("get", "controllerrevisions", "-o", "name").split()
    (before,) = {name.rpartition("-")[2] for name in kept} - {now}
    pool.patch({"op": "add", "path": "/spec/rollout", "value": {"rollbackTo": before}})
    assert pool.wait_ready()["status"]["revision"] == before
    budget(pool, 2048)  # the budget of that revision, so following the spec again replaces no pod
    assert pool.wait_ready()["status"]["revision"] == before


def superseded(pool: PoolOnNode) -> None:
    budget(pool, 1001)
    first = pool.until(moves, "the rollout has begun")["status"]["revision"]
    eventually(lambda: len(pool.pods("prefill", ready=False)) > 1, "a pod of it was started", 60)
    budget(pool, 1002)
    assert pool.wait_ready()["status"]["revision"] != first


def moves(pool: dict[str, Any]) -> bool:
    statuses = {one["type"]: one["status"] for one in pool["status"]["conditions"]}
    return statuses["Progressing"] == "True"


def operator_killed(pool: PoolOnNode) -> None:
    """Kill the leading operator during a rollout; another operator continues the rollout."""
    budget(pool, 1003)
    pool.until(moves, "the rollout has begun")
    lease = ("get", "lease", "-n", OPERATORS, "-o", "jsonpath={.items[0].spec.holderIdentity}")
    leader = pool.cluster.kubectl(*lease)
    pool.cluster.kubectl("delete", "pod", "-n", OPERATORS, leader, "--force", "--grace-period=0")
    assert pool.wait_ready()["status"]["revision"]
    assert pool.cluster.kubectl(*lease) != leader


def gateway_deleted(pool: PoolOnNode) -> None:
    pool.kubectl("delete", "pod", pool.busy_gateway())
    pool.wait_pods("gateway", 2)


def gateway_killed(pool: PoolOnNode) -> None:
    pool.kill(pool.busy_gateway())
    eventually(lambda: len(pool.pods("gateway")) < 2, "the pods are gone", 30)
    pool.wait_pods("gateway", 2)


def worker_deleted(pool: PoolOnNode) -> None:
    for role in ("prefill", "decode"):
        pool.kubectl("delete", "pod", pool.pods(role)[0])
        pool.wait_pods(role, 1)
    pool.wait_ready()


def worker_killed(pool: PoolOnNode) -> None:
    for role in ("prefill", "decode"):
        pool.kill(pool.pods(role)[0])
        eventually(lambda role=role: not pool.pods(role), "the pods are gone", 30)  # type: ignore[misc]
        pool.wait_pods(role, 1)
    pool.wait_ready()


def evicted(pool: PoolOnNode) -> None:
    """Evict pods as `kubectl drain` does; the disruption budget permits one pod of a role at a time."""
    replicas(pool, "decode", 2)
    pool.wait_ready()
    first, second = pool.pods("decode")
    assert pool.evict(first)
    assert not pool.evict(second), "the budget permits one eviction at a time"
    pool.settled_away(first)
    pool.wait_pods("decode", 2)
    replicas(pool, "decode", 1)
    pool.wait_ready()


EVENTS: dict[str, Callable[[PoolOnNode], None]] = {
    "scale out decode": scale_out,
    "scale in decode": scale_in,
    "rolling update of both roles": rolling_update,
    "rollback": rollback,
    "an edit superseded by another": superseded,
    "the leading operator killed in a rollout": operator_killed,
    "a gateway pod deleted": gateway_deleted,
    "a gateway killed": gateway_killed,
    "worker pods deleted": worker_deleted,
    "workers killed": worker_killed,
    "a worker pod evicted": evicted,
}
SHORT = ("rolling update of both roles", "workers killed")


def undergo(pool: PoolOnNode, question_list: list[Question], event: str, say: Callable[[str], None]) -> Row:
    """Run one event under load and return its row."""
    with Load(pool.http, MODEL, question_list) as load:
        load.flows(2)
        began = CLOCK.monotonic()
        EVENTS[event](pool)
        ready = CLOCK.monotonic()
        load.flows(4)
        load_ended = load.ended
    row = table.row(event, load_ended, ready - began)
    say(f"{event}: {table.described(row)}")
    for end in load_ended:
        if end.outcome is not Outcome.RIGHT:
            say(f"    {end.outcome} at {end.began - began:.1f} s, after {end.seconds:.1f} s: {end.note}")
    assert event != table.MAY_CUT or row.cut + row.retried > 0, "the deleted gateway served no client"
    return row


def judge(row: Row) -> None:
    assert row.wrong == 0, row
    assert row.lost == 0, row
    assert row.cut == 0 or row.event == table.MAY_CUT, row


@pytest.mark.long
@pytest.mark.parametrize("event", EVENTS)
def test_no_request_is_lost(
    pool: PoolOnNode, question_list: list[Question], event: str, say: Callable[[str], None]
) -> None:
    row = undergo(pool, question_list, event, say)
    table.record(row, machine.cpu_name())
    judge(row)


def test_the_table_has_the_events_of_this_file() -> None:
    assert tuple(EVENTS) == table.EVENTS


@pytest.mark.parametrize("event", SHORT)
def test_no_request_is_lost_in_short_runs(
    pool: PoolOnNode, question_list: list[Question], event: str, say: Callable[[str], None]
) -> None:
    judge(undergo(pool, question_list, event, say))
