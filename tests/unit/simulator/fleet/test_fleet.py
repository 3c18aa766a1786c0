"""A simulated pool serves every request, deterministically, and releases all pages."""

from dataclasses import replace

import pytest
from unit.simulator.simulated import ENGINE, GATEWAY, a_demand, a_pool, check_idle, seen

from kvferry.bench.workload.lengths import LengthMix
from kvferry.core.errors import UsageError
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.gateway.decide.cache_map.cache_map import CacheMap
from kvferry.gateway.decide.cache_map.map_states import MapState
from kvferry.simulator.fleet import gateway as simulated_gateway
from kvferry.simulator.fleet.fleet import Failure, SimulatedPool
from kvferry.simulator.requests.demand import Demand, Tenant
from kvferry.simulator.requests.tokens import Tape

ROLES = [{"both": 3}, {"prefill": 1, "decode": 2}]


@pytest.mark.parametrize("roles", ROLES)
def test_every_request_ends_and_no_page_stays_in_use(roles: dict[str, int]) -> None:
    pool = a_pool(a_demand(), roles)
    result = pool.run()
    m = result.measures
    assert m.completed == m.arrived == 120
    assert m.ttft.count == 120
    assert m.itl.count == m.output_tokens - 120
    assert m.refused == m.resumed == 0
    check_idle(pool)
    if "decode" in roles:
        assert result.transfers.transfers == 120
        assert result.transfers.failures == 0
        assert result.transfers.num_bytes > 0


@pytest.mark.parametrize("roles", ROLES)
def test_the_same_seed_gives_the_same_times_and_another_seed_others(roles: dict[str, int]) -> None:
    first = seen(a_pool(a_demand(), roles))
    assert seen(a_pool(a_demand(), roles)) == first
    assert seen(a_pool(a_demand(), roles, seed=4)) != first


@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize("blocks", [2048, 60])
def test_runs_of_decode_steps_give_the_times_of_single_steps(roles: dict[str, int], blocks: int) -> None:
    """With 60 blocks, pages run short and sequences are preempted."""
    demand = a_demand(count=80, num_prefix=32, num_prefixes=2, num_turns=2, turn_seconds=1.0)
    engine = replace(ENGINE, num_blocks=blocks)
    runs = seen(a_pool(demand, roles, engine=engine))
    single = seen(a_pool(demand, roles, engine=replace(engine, takes_runs=False)))
    assert runs.pop("ended") == pytest.approx(single.pop("ended"), rel=1e-12)
    assert runs == single


@pytest.mark.parametrize("roles", ROLES)
def test_workers_that_share_cores_are_slower_together_and_jitter_makes_tails(roles: dict[str, int]) -> None:
    def results(**changes: object) -> list[float]:
        pool = a_pool(a_demand(rate=60.0), roles)
        specs = tuple(replace(role, jitter=changes.get("jitter", ())) for role in pool._spec.roles)
        spec = replace(pool._spec, roles=specs, cores=changes.get("cores"))
        again = SimulatedPool(spec, a_demand(rate=60.0).requests(Tape(3), 3))
        measures = again.run().measures
        assert measures.completed == 120
        check_idle(again)
        return [measures.itl.percentile(50), measures.itl.percentile(99), measures.ended_at]

    alone, enough, shared = results(), results(cores=3.0), results(cores=1.0)
    assert enough == pytest.approx(alone, rel=0.02)
    assert shared[0] > 1.3 * alone[0]
    jittered = results(jitter=(0.5, 1.0, 1.0, 1.0, 4.0))
    assert jittered[1] > 1.5 * alone[1]
    assert jittered == results(jitter=(0.5, 1.0, 1.0, 1.0, 4.0))


def test_runs_of_decode_steps_occur() -> None:
    demand = a_demand(count=40, rate=2.0)
    fast, slow = a_pool(demand, {"both": 1}), a_pool(demand, {"both": 1}, engine=replace(ENGINE, takes_runs=False))
    assert fast.run().events < 0.5 * slow.run().events


def test_the_gateway_has_an_exact_map_of_the_caches_of_workers() -> None:
    pool = a_pool(a_demand(num_prefix=64, num_prefixes=3), {"both": 3})
    pool.run()
    pool.clock.run()
    for member in pool.gateway.members:
        assert pool.gateway.cache_map.state(member.name) is MapState.EXACT
        assert pool.gateway.cache_map.replicas[member.name].count == len(member.replica.allocator.index)
    assert not any(pool.gateway.cache_map.losses.values())


def test_shared_prefixes_are_found_in_the_caches() -> None:
    shared = a_pool(a_demand(num_prefix=256, num_prefixes=2), {"both": 2}).run().measures
    assert shared.hit_rate > 0.4
    assert a_pool(a_demand(), {"both": 2}).run().measures.hit_rate == 0.0


def test_turns_of_a_conversation_find_the_output_of_the_turn_before() -> None:
    demand = a_demand(
        count=40, rate=1.0, lengths=LengthMix(num_input=32, num_output=160), num_turns=4, turn_seconds=5.0
    )
    assert a_pool(demand, {"both": 2}).run().measures.hit_rate > 0.7


def with_agents(retain_seconds: float) -> Demand:
    """Return agents that wait for tools between their turns, beside others whose prompts fill the caches."""
    agents = Tenant("agents", share=1.0, num_turns=4, turn_seconds=6.0, retain_seconds=retain_seconds)
    return a_demand(
        count=900,
        rate=24.0,
        lengths=LengthMix(num_input=240, num_output=16),
        tenants=(agents, Tenant("others", share=9.0)),
    )


@pytest.mark.parametrize("roles", ROLES)
def test_retained_prompts_are_found_by_the_next_turn(roles: dict[str, int]) -> None:
    engine = replace(ENGINE, num_blocks=480, retention_share=0.9)
    results = []
    for seconds in (0.0, 20.0):
        pool = a_pool(with_agents(seconds), roles, engine=engine)
        results.append(pool.run())
        check_idle(pool)
    lru, kept = results
    granted = {role: totals.counts.retained for role, totals in kept.roles.items()}
    assert sum(granted.values()) > 30
    assert all(totals.counts.retained == totals.counts.unretained == 0 for totals in lru.roles.values())
    assert kept.measures.hit_tokens > lru.measures.hit_tokens + 5000
    turns = [result.measures.tenants["agents"].ttft for result in (lru, kept)]
    assert turns[0].count == turns[1].count
    assert turns[1].mean < turns[0].mean


def test_retentions_beyond_the_share_are_refused() -> None:
    engine = replace(ENGINE, num_blocks=320, retention_share=0.1)
    result = a_pool(with_agents(60.0), {"both": 2}, engine=engine).run()
    counts = result.roles["both"].counts
    assert counts.retained > 0
    assert counts.unretained > 0


def test_a_sequence_that_waits_for_retained_pages_runs_when_their_time_ends() -> None:
    engine = replace(ENGINE, num_blocks=48, retention_share=0.5)
    demand = a_demand(
        count=40, rate=50.0, lengths=LengthMix(num_input=300, num_output=8), tenants=(Tenant("a", retain_seconds=5.0),)
    )
    pool = a_pool(demand, {"both": 1}, engine=engine)
    assert pool.run().measures.completed == 40
    check_idle(pool)


@pytest.mark.parametrize("roles", ROLES)
def test_the_requests_of_a_lost_worker_continue_on_others(roles: dict[str, int]) -> None:
    role = "both" if "both" in roles else "decode"
    failures = (Failure(1.0, role, 0, restart_seconds=2.0), Failure(1.5, role, 1, restart_seconds=2.0))
    demand = a_demand(rate=60.0)
    pool = a_pool(demand, roles, failures=failures)
    result = pool.run()
    m = result.measures
    assert m.completed == 120
    assert m.resumed > 0
    assert m.ttft.count == 120  # a first token is counted once
    assert m.output_tokens == a_pool(demand, roles).run().measures.output_tokens
    check_idle(pool)
    assert {name: totals.replicas for name, totals in pool.result().roles.items()} == roles


def test_the_loss_of_a_prefill_worker_in_a_transfer_costs_time_only() -> None:
    failures = tuple(Failure(0.2 + 0.3 * number, "prefill", 0, restart_seconds=0.05) for number in range(8))
    pool = a_pool(a_demand(rate=60.0), {"prefill": 1, "decode": 2}, failures=failures)
    assert pool.run().measures.completed == 120
    check_idle(pool)


def test_a_full_queue_refuses() -> None:
    gateway = replace(GATEWAY, max_queued=4, max_streams=2)
    m = a_pool(a_demand(rate=500.0), {"both": 1}, gateway=gateway).run().measures
    assert m.refused > 0
    assert m.completed + m.refused == 120


def test_without_a_map_the_gateway_routes_by_its_history() -> None:
    demand = a_demand(num_prefix=256, num_prefixes=2)
    m = a_pool(demand, {"both": 2}, gateway=replace(GATEWAY, has_map=False)).run().measures
    assert m.completed == 120
    assert m.hit_rate > 0.3


@pytest.mark.parametrize("roles", ROLES)
def test_a_request_that_a_worker_cannot_hold_is_an_error_with_a_remedy(roles: dict[str, int]) -> None:
    demand = a_demand(count=1, lengths=LengthMix(num_input=500, num_output=10))
    remedy = (
        r"request 0 has 500 prompt and 10 output tokens, which need 32 blocks; engine.blocks .* is 31; use at least 32"
    )
    with pytest.raises(UsageError, match=remedy):
        a_pool(demand, roles, engine=replace(ENGINE, num_blocks=31)).run()
    assert a_pool(demand, roles, engine=replace(ENGINE, num_blocks=32)).run().measures.completed == 1


def test_more_pages_than_memory_can_hold_are_an_error() -> None:
    with pytest.raises(UsageError, match=r"have 33554433 blocks; at most 33554432 are simulated: lower engine.blocks"):
        a_pool(a_demand(), {"both": 1}, engine=replace(ENGINE, num_blocks=(1 << 25) + 1))


def test_an_arrival_that_the_clock_cannot_tell_apart_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"request 1 arrives .* s after the start; .*: raise workload.rate"):
        a_pool(a_demand(rate=1e-12), {"both": 1}).run()


def test_workers_without_room_in_the_map_are_routed_by_history() -> None:
    pool = a_pool(a_demand(num_prefix=256, num_prefixes=2), {"both": 600})
    assert pool.run().measures.completed == 120
    states = [replica.state for replica in pool.gateway.cache_map.replicas.values()]
    assert (len(states), states.count(MapState.BLIND)) == (600, 88)


def test_a_full_map_drops_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_gateway, "CacheMap", lambda clock: CacheMap(clock, max_blocks=100))
    pool = a_pool(a_demand(), {"both": 2})
    assert pool.run().measures.completed == 120
    assert MapState.BLIND in [replica.state for replica in pool.gateway.cache_map.replicas.values()]


def test_prompts_beyond_the_memory_of_the_queue_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_gateway, "_MAX_QUEUED_BYTES", 8 * 1000)
    gateway = replace(GATEWAY, max_streams=2)
    m = a_pool(a_demand(rate=500.0), {"both": 1}, gateway=gateway).run().measures
    assert m.refused > 0
    assert m.completed + m.refused == 120


def test_invariants_hold_after_every_step() -> None:
    checked = 0

    def watch(member: object) -> None:
        replica = member.replica
        original = replica._flush

        def flush() -> None:
            nonlocal checked
            original()
            replica.allocator.check_integrity()
            checked += 1

        replica._flush = flush

    limits = SchedulerLimits(token_budget=128, max_chunk_tokens=64, max_mixed_tokens=64, max_num_seqs=8)
    engine = replace(ENGINE, num_blocks=48, limits=limits)
    pool = a_pool(a_demand(count=60), {"prefill": 1, "decode": 1}, engine=engine, on_join=watch)
    pool.run()
    assert checked > 100
