"""Synthetic workloads: order, shared prefixes, lengths, and lazy generation."""

import itertools
import statistics
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.simulator.simulated import a_demand

from kvferry.bench.workload.arrivals import Arrivals
from kvferry.bench.workload.lengths import LengthMix
from kvferry.bench.workload.requests import BenchRequest
from kvferry.core.errors import UsageError
from kvferry.simulator.requests.demand import Demand, Tenant, of_trace
from kvferry.simulator.requests.tokens import Output, Tape

TAPE = Tape(1)


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 60), turns=st.integers(1, 4), prefix=st.sampled_from([0, 16, 40]), seed=st.integers(0, 9),
    process=st.sampled_from(["poisson", "burst", "gamma"]),
)  # fmt: skip
def test_requests_come_in_order_with_unique_numbers(
    count: int, turns: int, prefix: int, seed: int, process: str
) -> None:
    demand = Demand(
        LengthMix(num_input=20, num_output=5, spread=0.5), count, Arrivals(process, rate=3.0), num_prefix=prefix,
        num_prefixes=2, num_turns=turns, turn_seconds=1.5,
    )  # fmt: skip
    made = list(demand.requests(TAPE, seed))
    assert [r.index for r in made] == list(range(count))
    assert [r.at for r in made] == sorted(r.at for r in made)
    assert made == list(demand.requests(TAPE, seed))


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    made = list(a_demand(count=60, num_prefix=48, num_prefixes=3).requests(TAPE, 1))
    assert len({tuple(r.prompt[:48]) for r in made}) == 3
    assert len({r.prompt[48] for r in made}) == 60


def test_a_turn_begins_with_the_turn_before_and_its_output() -> None:
    made = list(a_demand(count=12, rate=0.01, num_turns=3, turn_seconds=1.0).requests(TAPE, 1))
    for first, second in itertools.pairwise(made[:3]):
        whole = [*first.prompt, *first.output.ids()]
        assert second.prompt[: len(whole)] == whole
        assert second.at == first.at + 1.0


def test_a_conversation_ends_before_it_exceeds_the_context() -> None:
    demand = a_demand(count=50, num_turns=50, most_tokens=600)
    assert max(len(r.prompt) + r.output.count for r in demand.requests(TAPE, 1)) <= 600


def test_requests_are_drawn_one_by_one() -> None:
    demand = a_demand(count=100_000_000, rate=1e6)
    assert len(list(itertools.islice(demand.requests(TAPE, 1), 5))) == 5


def test_tenants_get_their_shares() -> None:
    tenants = (Tenant("a", share=3.0), Tenant("b", share=1.0, priority=5))
    made = list(a_demand(count=2000, tenants=tenants).requests(TAPE, 1))
    assert statistics.fmean(r.tenant == "a" for r in made) == pytest.approx(0.75, abs=0.03)
    assert {r.priority for r in made if r.tenant == "b"} == {5}


@pytest.mark.parametrize(("kind", "num_input", "num_output"), [("sharegpt", 161.31, 337.99), ("alpaca", 19.31, 58.45)])
def test_heavy_tailed_lengths_have_the_published_means(kind: str, num_input: float, num_output: float) -> None:
    draw, mix = Random(2), LengthMix(kind)
    drawn = [mix.draw(draw) for _ in range(30_000)]
    assert statistics.fmean(a for a, _ in drawn) == pytest.approx(num_input, rel=0.03)
    assert statistics.fmean(b for _, b in drawn) == pytest.approx(num_output, rel=0.03)
    assert max(a + b for a, b in drawn) <= 2048
    assert min(min(pair) for pair in drawn) >= 1


def test_the_copies_of_a_trace_share_nothing() -> None:
    trace = [BenchRequest(0.0, tuple(range(300, 340)), 4), BenchRequest(1.0, tuple(range(300, 360)), 4)]
    made = list(of_trace(trace, TAPE, repeat=3))
    assert [r.at for r in made] == [0.0] * 3 + [1.0] * 3
    assert made[0].prompt == made[3].prompt[:40]
    assert made[1].prompt[1:] == list(made[0].prompt[1:])
    assert len({r.prompt[0] for r in made[:3]}) == 3
    assert made[1].prompt[0] == made[4].prompt[0]


def test_the_outputs_of_a_trace_are_generated_again() -> None:
    trace = [BenchRequest(0.0, (1, 2), 3, output=(7, 8, 9)), BenchRequest(1.0, (1, 2), 3)]
    known, drawn = (request.output for request in of_trace(trace, TAPE))
    assert known.ids() == [7, 8, 9]
    assert [token.token_id for token in known.sampled(1, 2)] == [8, 9]
    assert drawn.ids() == TAPE.ids(drawn.place, 3)


@given(place=st.integers(0, 1 << 20), count=st.integers(0, 500))
def test_ids_equal_the_sampled_tokens_at_the_same_position(place: int, count: int) -> None:
    assert [token.token_id for token in TAPE.sampled(place, count)] == TAPE.ids(place, count)
    output = Output(TAPE, place, count)
    assert [t.token_id for t in (*output.sampled(0, count // 2), *output.sampled(count // 2, count - count // 2))] == (
        output.ids()
    )


@pytest.mark.parametrize("field", ["count", "num_prefixes", "num_turns", "most_tokens"])
def test_numbers_out_of_range_are_refused_by_name(field: str) -> None:
    with pytest.raises(UsageError, match="requests" if field == "count" else field):
        a_demand(**{field: 0})


def test_conversations_that_wait_with_too_many_tokens_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.simulator.requests.demand._MAX_WAITING_TOKENS", 3000, raising=False)
    fast = a_demand(count=120, num_turns=3, turn_seconds=100.0)
    with pytest.raises(UsageError, match=r"conversations with .* tokens wait for their next turn; lower workload.rate"):
        list(fast.requests(TAPE, 1))
    assert len(list(a_demand(count=120, num_turns=3, turn_seconds=0.1).requests(TAPE, 1))) == 120
