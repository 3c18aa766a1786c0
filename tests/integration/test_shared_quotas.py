"""Quotas that gateways share: the script in a real Redis and the gateways' own arithmetic, over many interleavings, and
whole gateways with a server that is slow, full, a replica, or gone."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import astuple, dataclass, field
from typing import Any

import httpx
import pytest
import redis
from harness.fakes.scripted_gateway import ScriptedGateway, scripted_gateway
from harness.servers.redis_relay import relay
from harness.servers.redis_server import RedisServer, redis_server
from harness.waiting import eventually
from hypothesis import given
from hypothesis import strategies as st

from kvferry.gateway.admission.lease_script import LEASE_SCRIPT
from kvferry.gateway.admission.tenants import key_digest
from kvferry.gateway.decide.config import StateConfig
from kvferry.gateway.decide.flow.leased_budget import INTERVAL_SECONDS, LEASE_SECONDS
from kvferry.gateway.decide.flow.quotas import QuotaExceeded
from kvferry.gateway.decide.flow.shared_quotas import LeaseAnswer, LeaseReport, SharedQuotas
from kvferry.gateway.decide.flow.tenant_table import TenantPolicy

KEY = b"k" * 32
EXPIRY = LEASE_SECONDS + 1


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port) as connected:
        yield connected


@dataclass
class Call:
    """A call that was sent, as the server gets it."""

    keys: list[str]
    arguments: list[Any]
    reports: list[LeaseReport]


@dataclass
class Pool:
    """Gateways that share the quotas of one tenant, with a time that only the test moves."""

    client: redis.Redis
    policy: TenantPolicy
    now: float = 1e6
    admitted: float = 0.0
    tokens: float = 0.0
    num_calls: int = 0
    gateways: list[SharedQuotas] = field(default_factory=list)
    dice: random.Random = field(default_factory=lambda: random.Random(7))

    def __post_init__(self) -> None:
        self.client.flushall()
        self.script = self.client.register_script(LEASE_SCRIPT)

    def add(self, number: int = 1) -> None:
        self.gateways += [SharedQuotas() for _ in range(number)]

    def sent(self, gateway: SharedQuotas, *, leaves: bool = False) -> Call:
        reports = list(gateway.reports(self.now, leaves=leaves))
        arguments: list[Any] = [0, str(id(gateway)), gateway.sent(self.now), round(1e3 * EXPIRY), int(leaves)]
        for each in reports:
            arguments += [each.answered, *astuple(each.requests), *astuple(each.tokens), *astuple(each.slots)]
        return Call(["gateways", *("q:" + each.tenant for each in reports)], arguments, reports)

    def run(self, call: Call) -> list[Any]:
        self.num_calls += 1
        found: list[Any] = self.script(call.keys, [round(1e3 * self.now), *call.arguments[1:]])
        return found

    def report(self, gateway: SharedQuotas, *, is_lost: bool = False, leaves: bool = False) -> None:
        call = self.sent(gateway, leaves=leaves)
        found = self.run(call)
        if not is_lost:
            answers = {
                report.tenant: LeaseAnswer.parse(text, report)
                for report, text in zip(call.reports, found[1:], strict=True)
                if text is not None
            }
            gateway.answer(answers, int(found[0]), self.now)

    def ask(self, gateway: SharedQuotas, tokens: float = 1.0, *, is_lost: bool = False) -> bool:
        """Send a request to a gateway, and return whether it was admitted."""
        if gateway.lacks("t", self.policy, tokens, self.now):
            self.report(gateway, is_lost=is_lost)
        try:
            gateway.check("t", self.policy, tokens, self.now)
        except QuotaExceeded:
            return False
        gateway.begin("t", tokens)
        self.admitted += 1
        self.tokens += tokens
        return True

    def end(self, gateway: SharedQuotas, tokens: float = 1.0, used: float | None = None) -> None:
        used = tokens if used is None else used
        gateway.end("t", tokens, used)
        self.tokens += used - tokens

    def wait(self, seconds: float, *, dead: int = -1) -> None:
        """Let time pass, in which all gateways but `dead` report."""
        for _ in range(max(1, round(seconds / INTERVAL_SECONDS))):
            self.now += seconds / max(1, round(seconds / INTERVAL_SECONDS))
            for number, gateway in enumerate(self.gateways):
                if number != dead:
                    self.report(gateway)

    def load(self, shares: dict[int, float], seconds: float, tokens: float = 1.0) -> dict[int, int]:
        """Send requests at constant rates, and return the number that each gateway admitted.

        Args:
            shares: requests per second by gateway.
            seconds: duration.
            tokens: tokens of each.
        """
        due = {number: self.now + (0.5 + number / 7) / rate for number, rate in shares.items()}
        beats = {number: self.now + number / 13 for number in range(len(self.gateways))}
        end, found = self.now + seconds, dict.fromkeys(shares, 0)
        while True:
            at, kind, number = min(
                min((at, "ask", number) for number, at in due.items()),
                min((at, "beat", number) for number, at in beats.items()),
            )
            if at > end:
                self.now = end
                return found
            self.now, gateway = at, self.gateways[number]
            if kind == "beat":
                self.report(gateway)
                beats[number] += INTERVAL_SECONDS * self.dice.uniform(0.8, 1.0)
            else:
                due[number] += 1 / shares[number]
                if self.ask(gateway, tokens):
                    self.end(gateway, tokens)
                    found[number] += 1


@pytest.mark.parametrize(
    ("policy", "tokens"),
    [
        (TenantPolicy(requests_per_minute=600, request_burst=10), 1.0),
        (TenantPolicy(tokens_per_minute=60000, token_burst=2000), 100.0),
        (TenantPolicy(requests_per_minute=600, request_burst=10, tokens_per_minute=1e6), 10.0),
    ],
)
@pytest.mark.parametrize("demand", [{0: 20.0, 1: 20.0, 2: 20.0}, {0: 20.0, 1: 0.1, 2: 0.2}, {0: 30, 1: 6, 2: 2}])
def test_three_gateways_admit_the_limit_at_twice_the_demand(client, policy, tokens, demand):
    pool = Pool(client, policy)
    pool.add(3)
    found = pool.load(demand, 60.0, tokens)
    assert pool.admitted == pytest.approx(610 if tokens < 100 else 620, rel=0.02)
    assert pool.admitted <= (610 if tokens < 100 else 620) + 1e-6
    if demand[1] == demand[0]:
        assert min(found.values()) > 150, "no gateway's clients starve"
    num_asked = sum(demand.values()) * 60
    assert pool.num_calls < 3 * 60 / (0.8 * INTERVAL_SECONDS) + 0.2 * num_asked, "most requests cost no call"


def test_idle_gateways_give_what_they_have_to_a_busy_one_within_two_seconds(client):
    pool = Pool(client, TenantPolicy(requests_per_minute=6000, request_burst=300))
    pool.add(3)
    pool.load({0: 120.0, 1: 120.0, 2: 120.0}, 20.0)
    pool.load({0: 200.0, 1: 0.001, 2: 0.001}, 2.0)
    before = pool.admitted
    pool.load({0: 200.0, 1: 0.001, 2: 0.001}, 20.0)
    assert pool.admitted - before == pytest.approx(2000, rel=0.02)


def test_a_burst_goes_to_the_gateway_that_it_arrives_at(client):
    pool = Pool(client, TenantPolicy(requests_per_minute=60, request_burst=50))
    pool.add(3)
    assert sum(pool.ask(pool.gateways[1]) for _ in range(80)) == 50


def test_costly_requests_are_not_kept_out_by_parts_that_suffice_for_none(client):
    pool = Pool(client, TenantPolicy(tokens_per_minute=60000, token_burst=6000))
    pool.add(3)
    pool.load({0: 0.4, 1: 0.4, 2: 0.4}, 120.0, tokens=5000)
    assert pool.tokens == pytest.approx(120 * 1000 + 6000, rel=0.05)


def test_what_a_request_used_beyond_its_charge_is_paid_by_all(client):
    pool = Pool(client, TenantPolicy(tokens_per_minute=6000, token_burst=1000))
    pool.add(2)
    first, second = pool.gateways
    assert pool.ask(first, 900)
    pool.end(first, 900, used=3000)
    pool.wait(1)
    assert not pool.ask(second, 100)
    with pytest.raises(QuotaExceeded) as over:
        second.check("t", pool.policy, 100, pool.now)
    assert over.value.retry_after_seconds == pytest.approx((2100 - 100) / 100, abs=1.1)
    pool.wait(over.value.retry_after_seconds)
    assert pool.ask(second, 100), "after the retry time of the refusal"


def test_what_a_request_did_not_use_comes_back(client):
    pool = Pool(client, TenantPolicy(tokens_per_minute=60, token_burst=1000))
    pool.add(2)
    first, second = pool.gateways
    assert pool.ask(first, 1000)
    assert not pool.ask(second, 500)
    pool.end(first, 1000, used=100)
    pool.wait(1)
    assert pool.ask(second, 500)


def test_slots_are_shared_and_divided_among_gateways_that_want_them(client):
    pool = Pool(client, TenantPolicy(concurrent_requests=9))
    pool.add(3)
    first, second, third = pool.gateways
    assert sum(pool.ask(first) for _ in range(12)) == 9
    assert not pool.ask(second)
    for _ in range(40):  # one request of the first ends and another arrives, while the second asks all the time
        pool.now += INTERVAL_SECONDS
        pool.end(first)
        pool.report(first)
        pool.report(second)
        pool.ask(first)
        pool.ask(second)
        if second.account("t").num_open == 4 and first.account("t").num_open == 5:
            break
        assert first.account("t").num_open + second.account("t").num_open <= 9
    else:
        raise AssertionError((first.account("t").num_open, second.account("t").num_open))
    assert third.account("t").num_open == 0


def test_slots_of_a_gateway_that_died_come_back_after_its_lease(client):
    pool = Pool(client, TenantPolicy(concurrent_requests=4))
    pool.add(2)
    first, second = pool.gateways
    assert sum(pool.ask(first) for _ in range(4)) == 4
    assert not pool.ask(second)
    pool.wait(LEASE_SECONDS, dead=0)
    assert not pool.ask(second), "the first may still run its requests"
    pool.wait(2, dead=0)
    assert sum(pool.ask(second) for _ in range(5)) == 4


def test_a_gateway_that_ends_gives_back_what_it_has(client):
    pool = Pool(client, TenantPolicy(requests_per_minute=1, request_burst=10))
    pool.add(2)
    first, second = pool.gateways
    assert sum(pool.ask(first) for _ in range(4)) == 4
    pool.report(first, leaves=True)
    assert sum(pool.ask(second) for _ in range(9)) == 6
    assert second.num_gateways == 1


def test_a_call_that_arrives_late_is_ignored_and_a_lost_answer_is_taken_back(client):
    pool = Pool(client, TenantPolicy(requests_per_minute=1, request_burst=10))
    pool.add(2)
    first, second = pool.gateways
    assert pool.ask(first)
    pool.now += INTERVAL_SECONDS
    late = pool.sent(first)
    assert first.lacks("t", pool.policy, 5.0, pool.now) in (True, False)
    pool.now += INTERVAL_SECONDS
    pool.report(first, is_lost=True)  # the server granted units, and its answer is lost
    pool.report(first)
    assert pool.run(late)[1] is None
    pool.wait(10)
    assert sum(pool.ask(second) for _ in range(12)) in (8, 9)
    assert pool.admitted <= 10 + pool.now / 60


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "beat", "beat", "wait", "lost", "end", "late", "leave", "die"]),
        st.integers(0, 2),
        st.floats(0.01, 2.0),
        st.integers(1, 300),
    ),
    max_size=120,
)


@given(STEPS)
def test_no_interleaving_admits_more_than_the_limit_and_the_leases_of_the_dead(client, steps):
    policy = TenantPolicy(requests_per_minute=120, request_burst=8, tokens_per_minute=6000, token_burst=700)
    pool = Pool(client, policy)
    pool.add(3)
    start, num_dead, late = pool.now, 0, []
    for kind, number, pause, tokens in steps:
        gateway = pool.gateways[number]
        if kind in ("ask", "end"):
            if pool.ask(gateway, tokens):
                pool.end(gateway, tokens, None if kind == "ask" else tokens * pause / 2)
        elif kind == "beat":
            pool.report(gateway)
        elif kind == "lost":
            pool.report(gateway, is_lost=True)
        elif kind == "late":
            late.append(pool.sent(gateway))
        elif kind == "wait":
            pool.now += pause
            for call in late:
                pool.run(call)
            late.clear()
            for each in pool.gateways:  # gateways that live report within a lease
                pool.report(each)
        else:
            if kind == "leave":
                pool.report(gateway, leaves=True)
            else:
                num_dead += 1
            pool.gateways[number] = SharedQuotas()
    seconds = pool.now - start
    # The reports of a gateway are at most 2 s apart here, and a dead one had at most a bucket.
    assert pool.admitted <= (1 + num_dead) * 8 + 2 * seconds + 1e-3
    corrections = 300 * 3
    assert pool.tokens <= (1 + num_dead) * 700 + 100 * seconds + corrections


def test_without_the_server_each_gateway_has_its_part_and_afterwards_all_is_as_before(client):
    pool = Pool(client, TenantPolicy(requests_per_minute=600, request_burst=30))
    pool.add(3)
    pool.load({0: 20.0, 1: 20.0, 2: 20.0}, 10.0)
    pool.admitted, start = 0.0, pool.now
    while pool.now < start + 60:
        pool.now += 0.05
        for gateway in pool.gateways:
            gateway.failed()
            pool.ask(gateway)
    assert 590 <= pool.admitted <= 600 + 30 + 12, "the limit, and what was left in the bucket and leased"
    pool.admitted = 0.0
    pool.load({0: 20.0, 1: 20.0, 2: 20.0}, 30.0)
    assert pool.admitted == pytest.approx(300, rel=0.1), "what was used meanwhile is charged"


def test_a_server_that_lost_its_data_starts_where_it_was(client):
    pool = Pool(client, TenantPolicy(requests_per_minute=60, request_burst=100))
    pool.add(2)
    pool.load({0: 20.0, 1: 20.0}, 20.0)
    client.flushall()
    pool.admitted = 0.0
    pool.load({0: 20.0, 1: 20.0}, 10.0)
    assert pool.admitted <= 10 + 10, "no second burst of 100"


def test_a_gateway_that_was_stopped_does_not_use_what_went_to_others(client):
    pool = Pool(client, TenantPolicy(requests_per_minute=60, request_burst=12))
    pool.add(2)
    first, second = pool.gateways
    pool.load({0: 10.0, 1: 0.001}, 0.4)
    pool.wait(60, dead=0)
    assert sum(pool.ask(second) for _ in range(20)) == 12
    assert first.is_alone(pool.now)
    assert sum(pool.ask(first) for _ in range(20)) <= 12 / 2 + 1, "its part, until it reports again"


@pytest.mark.parametrize("text", [b"", b"1 2", b"nan 0 0 0 0 0 0 0", b"1e9 0 0 0 0 0 0 0", b"0 0 0 0 0 0 99 0", b"x"])
def test_answers_without_sense_are_refused(text):
    quotas, policy = SharedQuotas(), TenantPolicy(requests_per_minute=60)
    assert quotas.lacks("t", policy, 1.0, 0.0)
    (report,) = quotas.reports(0.0)
    with pytest.raises(ValueError, match=r"an answer|could not convert"):
        LeaseAnswer.parse(text, report)


NO_RECORDS = [
    b"\xff\xff",
    b"",
    b"\x90",
    b"\x81\xa1n\x05",
    b"\x82\xa1n\x80\xa1r\x05",  # a number as bucket
    b"\x82\xa1n\x80\xa1r\x83\xa1l\xcb\x7f\xf8\0\0\0\0\0\0\xa1u\0\xa1g\x80",  # no number as level
    b"\x82\xa1n\x80\xa1r\x83\xa1l\xcb\xfe7\xe4<\x88\0u\x9c\xa1u\0\xa1g\x80",  # -1e300 as level
]


@pytest.mark.parametrize("found", NO_RECORDS)
def test_data_that_is_no_record_is_replaced(client, found):
    pool = Pool(client, TenantPolicy(requests_per_minute=60, request_burst=3))
    client.hset("q:t", "v", found)
    pool.add()
    assert sum(pool.ask(pool.gateways[0]) for _ in range(5)) == 3


@pytest.mark.parametrize("key", ["q:t", "gateways"])
def test_keys_of_another_type_are_replaced(client, key):
    pool = Pool(client, TenantPolicy(requests_per_minute=60, request_burst=3))
    client.set(key, "another's")
    pool.add()
    assert sum(pool.ask(pool.gateways[0]) for _ in range(5)) == 3


# -- whole gateways ----------------------------------------------------------------------------------------------------

TENANTS = """
[tenants.few]
keys = ["{few}"]
requests_per_minute = 6
request_burst = 30

[tenants.slots]
keys = ["{slots}"]
concurrent_requests = 6

[tenants.free]
keys = ["{free}"]
"""
BODY = {"prompt": "hi", "max_tokens": 1}


@asynccontextmanager
async def gateways(url: str, folder: Any, number: int = 3, key: bytes = KEY) -> AsyncIterator[list[ScriptedGateway]]:
    """Run gateways that share the quotas of the tenants `few` and `slots`; `free` has none."""
    path = folder / "tenants.toml"
    hashes = {name: f"sha256:{key_digest(name).hex()}" for name in ("few", "slots", "free")}
    path.write_text(TENANTS.format(**hashes))
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(scripted_gateway(state=StateConfig(url), tenant_key=key, tenants_file=path))
            for _ in range(number)
        ]


async def statuses(some: list[ScriptedGateway], tenant: str, number: int) -> list[httpx.Response]:
    """Send requests of a tenant to gateways in turns, all at the same time."""
    async with httpx.AsyncClient(timeout=30, headers={"authorization": f"Bearer {tenant}"}) as client:
        return list(
            await asyncio.gather(
                *(client.post(f"{some[n % len(some)].url}/v1/completions", json=BODY) for n in range(number))
            )
        )


def num_admitted(answers: list[httpx.Response]) -> int:
    assert {answer.status_code for answer in answers} <= {200, 429}
    return sum(answer.status_code == 200 for answer in answers)


def value_of(gateway: ScriptedGateway, name: str, **labels: str) -> float:
    found = gateway.gateway.instruments.registry.get_sample_value(name, labels)
    return 0.0 if found is None else found


async def all_counted(some: list[ScriptedGateway]) -> None:
    """Wait until each gateway knows of the others."""
    await eventually(lambda: all(each.gateway.gate.quotas.num_gateways == len(some) for each in some))


async def test_gateways_admit_one_limit_together(server, tmp_path):
    server.ask(b"FLUSHALL")
    async with gateways(f"redis://127.0.0.1:{server.port}", tmp_path) as some:
        answers = await statuses(some, "few", 90)
        assert 30 <= num_admitted(answers) <= 31
        (late, *_) = [answer for answer in answers if answer.status_code == 429]
        assert "has used up its quota requests_per_minute = 6" in late.json()["error"]["message"]
        assert 1 <= int(late.headers["retry-after"]) <= 600
        assert num_admitted(await statuses(some, "free", 30)) == 30
        assert value_of(some[0], "kvferry_gateway_state_calls_total", part="quotas", outcome="ok") < 60


async def test_the_key_of_another_pool_has_other_quotas(server, tmp_path):
    server.ask(b"FLUSHALL")
    url = f"redis://127.0.0.1:{server.port}"
    async with gateways(url, tmp_path, 1) as one, gateways(url, tmp_path, 1, b"x" * 32) as other:
        assert 30 <= num_admitted(await statuses(one, "few", 40)) <= 31
        assert 30 <= num_admitted(await statuses(other, "few", 40)) <= 31


async def test_slots_are_counted_over_gateways(server, tmp_path):
    server.ask(b"FLUSHALL")
    async with gateways(f"redis://127.0.0.1:{server.port}", tmp_path) as some:
        for _ in range(3):
            assert num_admitted(await statuses(some, "slots", 30)) <= 6 * 5, "a slot may serve several in turn"
        for each in some:
            assert each.gateway.gate.quotas.account("slots").num_open == 0
        held = sum(each.gateway.gate.quotas.leases["slots"].slots.limit for each in some)
        assert held <= 6


@pytest.mark.parametrize("how", ["gone", "read_only"])
async def test_without_a_server_that_answers_each_gateway_has_a_part(server, tmp_path, caplog, how):
    server.ask(b"FLUSHALL")
    with relay(str(server.socket_path)) as between:
        async with gateways(f"redis://127.0.0.1:{between.port}", tmp_path) as some:
            await all_counted(some)
            target = between.target
            if how == "gone":
                between.target = "/nowhere"
                for number in range(between.num_accepted):
                    between.stall(number)
            else:
                server.ask(b"REPLICAOF", b"127.0.0.1", b"1")
            try:
                await eventually(lambda: all(each.gateway.gate.quotas.is_failing for each in some))
                assert all(value_of(each, "kvferry_gateway_state_quotas_alone") == 1 for each in some)
                assert 30 <= num_admitted(await statuses(some, "few", 90)) <= 33
                assert num_admitted(await statuses(some, "free", 30)) == 30
                lines = [record.getMessage() for record in caplog.records if "quotas are not shared" in record.message]
                assert len(lines) == 3
                assert all("1/3 of each" in line for line in lines)
                if how != "gone":
                    assert value_of(some[0], "kvferry_gateway_state_calls_total", part="quotas", outcome=how) > 0
            finally:
                between.target = target
                server.ask(b"REPLICAOF", b"NO", b"ONE")
            await eventually(lambda: not any(each.gateway.gate.quotas.is_failing for each in some))
            assert all(value_of(each, "kvferry_gateway_state_quotas_alone") == 0 for each in some)
            assert num_admitted(await statuses(some, "few", 30)) <= 3, "what was used meanwhile is charged"


async def test_a_server_without_memory_shares_quotas_all_the_same(server, tmp_path):
    server.ask(b"FLUSHALL")
    async with gateways(f"redis://127.0.0.1:{server.port}", tmp_path) as some:
        await all_counted(some)
        server.ask(b"CONFIG", b"SET", b"maxmemory-policy", b"noeviction")
        server.ask(b"CONFIG", b"SET", b"maxmemory", b"1")
        try:
            assert 30 <= num_admitted(await statuses(some, "few", 90)) <= 31
            assert not any(each.gateway.gate.quotas.is_failing for each in some)
        finally:
            server.ask(b"CONFIG", b"SET", b"maxmemory", b"0")


async def test_a_server_that_does_not_answer_delays_no_other_tenant(server, tmp_path):
    server.ask(b"FLUSHALL")
    async with gateways(f"redis://127.0.0.1:{server.port}", tmp_path, 2) as some:
        await all_counted(some)
        server.ask(b"CLIENT", b"PAUSE", b"3000", b"ALL")
        few = asyncio.create_task(statuses(some, "few", 60))
        free = asyncio.create_task(statuses(some, "free", 20))
        done, _ = await asyncio.wait((few, free), return_when=asyncio.FIRST_COMPLETED)
        assert done == {free}, "the others wait for the server, for a second at most"
        assert num_admitted(await free) == 20
        assert 28 <= num_admitted(await few) <= 31


async def test_a_cancelled_request_that_waits_for_budget_takes_none(server, tmp_path):
    server.ask(b"FLUSHALL")
    async with gateways(f"redis://127.0.0.1:{server.port}", tmp_path, 1) as (one,):
        await all_counted([one])
        server.ask(b"CLIENT", b"PAUSE", b"300", b"ALL")
        waiting = asyncio.create_task(statuses([one], "slots", 1))
        await eventually(lambda: "slots" in one.gateway.gate.quotas.leases)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert num_admitted(await statuses([one], "slots", 6)) == 6
        assert one.gateway.gate.quotas.account("slots").num_open == 0
