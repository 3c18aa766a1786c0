"""Choices of endpoints: load, prefixes, subsets, adapters, pairs, several pickers."""

import json
from collections import Counter
from random import Random

import pytest

from kvferry.core.clock import ManualClock
from kvferry.picker.decide.choice import ChoiceConfig, EndpointChoice, Picked, PickRequest
from kvferry.picker.decide.endpoints import EndpointStates, PoolEndpoint, Trust
from kvferry.picker.decide.engine_metrics import EngineLoad
from kvferry.picker.decide.exchange import Refusal
from kvferry.picker.decide.prompt_body import PromptBody, read_body

MAX_WAITING, MAX_USAGE = 5, 0.95


def address(number: int) -> str:
    return f"10.0.{number // 250}.{number % 250 + 1}:8000"


class ChoiceRig:
    """A picker's choice over endpoints with pages."""

    def __init__(
        self, count: int, *, prefill: int = 0, clock: ManualClock | None = None, seed: int = 1, **config: object
    ) -> None:
        self.clock = clock or ManualClock()
        self.states = EndpointStates(self.clock, scrape_seconds=0.2, stale_seconds=10.0)
        self.choice = EndpointChoice(self.states, ChoiceConfig(**config), self.clock, Random(seed))  # type: ignore[arg-type]
        self.states.follow(
            PoolEndpoint(address(number), f"pod-{number}", address(number), is_prefill=number >= count)
            for number in range(count + prefill)
        )
        self.pages = 0
        for number in range(count + prefill):
            self.page(number)

    def page(self, number: int, running: int = 0, waiting: int = 0, **fields: object) -> None:
        self.pages += 1
        load = EngineLoad("vllm", running, waiting, **fields)  # type: ignore[arg-type]
        self.states.scraped(address(number), load, str(self.pages).encode(), self.clock.monotonic())
        self.clock.advance(0.001)

    def pick(self, prompt: PromptBody | None = None, subset: tuple[str, ...] | None = None) -> Picked:
        found = self.choice.pick(PickRequest(prompt or PromptBody(), subset))
        assert isinstance(found, Picked), found
        return found

    def refused(self, subset: tuple[str, ...] | None = None) -> Refusal:
        found = self.choice.pick(PickRequest(PromptBody(), subset))
        assert isinstance(found, Refusal)
        return found


def prompt(text: str, model: str = "m") -> PromptBody:
    return read_body(json.dumps({"model": model, "prompt": text}).encode())


LONG = "a prompt of many words. " * 300


def test_the_least_loaded_of_two_is_chosen() -> None:
    rig = ChoiceRig(2)
    rig.page(0, running=30)
    assert {rig.pick().sent.address for _ in range(5)} == {address(1)}


def test_a_burst_between_two_pages_spreads() -> None:
    rig = ChoiceRig(8)
    counts = Counter(rig.pick(prompt(f"{number} {LONG}")).sent.address for number in range(160))
    assert len(counts) == 8
    assert max(counts.values()) <= 40


def test_the_same_beginning_meets_and_spreads_under_load() -> None:
    rig = ChoiceRig(8)
    first = []
    for number in range(4):
        first.append(rig.pick(prompt(f"{LONG} {number}")))
        rig.states.answered(first[-1].sent)
    assert len({one.sent.address for one in first}) == 1
    assert [one.num_cached > 0 for one in first] == [False, True, True, True]
    many = Counter(rig.pick(prompt(f"{LONG} {number}")).sent.address for number in range(400))
    assert len(many) > 1, "a popular prefix takes more than one endpoint"


def test_several_pickers_send_the_same_beginning_to_the_same_endpoint() -> None:
    clock = ManualClock()
    rigs = [ChoiceRig(16, clock=clock, seed=seed) for seed in range(4)]
    for text in ("one ", "two ", "three "):
        assert len({rig.pick(prompt(text * 300)).sent.address for rig in rigs}) == 1


def test_several_pickers_do_not_all_take_the_one_idle_endpoint() -> None:
    clock = ManualClock()
    rigs = [ChoiceRig(32, clock=clock, seed=seed) for seed in range(16)]
    for rig in rigs:
        for number in range(1, 32):
            rig.page(number, running=8)
    counts = Counter(rig.pick(prompt(f"{seed} {LONG}")).sent.address for seed, rig in enumerate(rigs))
    assert counts[address(0)] <= 12
    assert len(counts) >= 4


def test_prompts_on_an_idle_pool_spread_evenly() -> None:
    rig = ChoiceRig(16)
    counts: Counter[str] = Counter()
    for number in range(480):
        picked = rig.pick(prompt(f"{number} {LONG}"))
        counts[picked.sent.address] += 1
        rig.states.ended(picked.sent)
    assert len(counts) == 16
    assert max(counts.values()) <= 90


def test_a_thousand_endpoints_are_not_all_compared() -> None:
    rig = ChoiceRig(1000, fallbacks=1000)  # all that were compared, but for the chosen one
    assert len(rig.pick(prompt(LONG)).route.endpoints) <= 12


def test_an_endpoint_that_leaves_moves_only_its_own_prompts() -> None:
    rig, other = ChoiceRig(20), ChoiceRig(19)
    moved = 0
    for number in range(60):
        text = f"{number} {LONG}"
        before = rig.pick(prompt(text))
        rig.states.ended(before.sent)
        after = other.pick(prompt(text))
        other.states.ended(after.sent)
        moved += before.sent.address not in (after.sent.address, address(19))
    assert moved <= 6


def test_a_subset_is_honoured() -> None:
    rig = ChoiceRig(6)
    rig.page(3, running=50)
    for _ in range(20):
        assert rig.pick(prompt(LONG), (address(3), "10.9.9.9:1")).sent.address == address(3)
    assert rig.pick(subset=("10.0.0.5",)).sent.address == address(4), "an entry without a port"
    assert (rig.refused(()).status, rig.refused(()).reason) == (503, "subset_empty")
    assert rig.refused(("10.9.9.9:1",)).status == 503


def test_a_pool_without_endpoints_refuses() -> None:
    assert (ChoiceRig(0).refused().status, ChoiceRig(0).refused().reason) == (503, "no_endpoints")


def test_stopping_endpoints_get_nothing() -> None:
    rig = ChoiceRig(2)
    rig.states.follow(
        PoolEndpoint(address(number), f"pod-{number}", address(number), is_stopping=number == 0) for number in range(2)
    )
    assert {rig.pick().sent.address for _ in range(10)} == {address(1)}
    rig.states.follow([PoolEndpoint(address(0), "pod-0", address(0), is_stopping=True)])
    assert rig.refused().status == 503


def test_lost_endpoints_are_used_only_without_others() -> None:
    rig = ChoiceRig(3)
    rig.clock.advance(60)
    rig.page(2, running=40)
    assert {rig.pick().sent.address for _ in range(10)} == {address(2)}
    assert rig.pick(subset=(address(0),)).trust is Trust.LOST
    rig.clock.advance(60)
    assert len({rig.pick(prompt(str(number))).sent.address for number in range(40)}) == 3


def test_an_adapter_goes_where_it_is_in_use() -> None:
    rig = ChoiceRig(8)
    rig.page(5, running=3, adapters=frozenset({"tuned"}))
    rig.clock.advance(0.1)
    assert rig.pick(prompt(LONG, model="tuned")).sent.address == address(5)
    assert rig.pick(prompt(LONG, model="tuned"), (address(1),)).sent.address == address(1)


def test_a_pair_of_prefill_and_decode() -> None:
    rig = ChoiceRig(3, prefill=2)
    found = rig.pick(prompt(LONG))
    assert found.route.prefill in (address(3), address(4))
    assert found.sent.address in map(address, range(3))
    assert len(rig.states.by_address[found.route.prefill].sent) == 1


def test_a_short_prompt_needs_no_prefill_endpoint() -> None:
    rig = ChoiceRig(3, prefill=2, skip_prefill_below_tokens=100)
    assert rig.pick(prompt("hi")).route.prefill == ""
    assert rig.pick(prompt(LONG)).route.prefill


def test_without_prefill_endpoints_the_others_serve_alone() -> None:
    rig = ChoiceRig(2, prefill=1)
    assert rig.pick(prompt(LONG), (address(0),)).route.prefill == ""


def test_fallbacks_are_other_endpoints() -> None:
    rig = ChoiceRig(8, fallbacks=2)
    endpoints = rig.pick(prompt(LONG)).route.endpoints
    assert len(set(endpoints)) == 3
    assert ChoiceRig(1, fallbacks=2).pick().route.endpoints == (address(0),)


def test_the_endpoint_that_served_has_the_prompt() -> None:
    rig = ChoiceRig(4)
    picked = rig.pick(prompt(LONG))
    other = next(address(number) for number in range(4) if address(number) != picked.sent.address)
    assert not rig.choice.served(picked, picked.sent.address)
    assert not rig.choice.served(picked, "")
    assert not rig.choice.served(picked, "10.9.9.9:1")
    assert rig.choice.served(picked, other)
    assert rig.states.history.cached(picked.names)[other] == len(picked.names)


@pytest.mark.parametrize("policy", ["latency", "prefix-hash", "round-robin", "least-loaded", "random"])
def test_every_policy_chooses(policy: str) -> None:
    rig = ChoiceRig(5, prefill=2, policy=policy)
    assert rig.pick(prompt(LONG)).sent.address in map(address, range(5))


def saturated(rig: ChoiceRig, subset: tuple[str, ...] | None = None) -> bool:
    rig.clock.advance(0.1)
    return rig.choice.is_saturated(subset, max_waiting=MAX_WAITING, max_usage=MAX_USAGE)


def test_a_pool_is_saturated_when_each_endpoint_is() -> None:
    rig = ChoiceRig(2)
    rig.page(0, running=9, waiting=5)
    assert not saturated(rig)
    assert saturated(rig, (address(0),))
    rig.page(1, running=9, usage=0.96)
    assert saturated(rig)
    rig.page(1, running=9, usage=0.5)
    assert not saturated(rig)


def test_a_burst_saturates_before_the_next_page() -> None:
    rig = ChoiceRig(1)
    rig.page(0, running=4, waiting=2)
    for _ in range(3):
        assert not saturated(rig)
        rig.pick()
    assert saturated(rig)


def test_a_pool_of_which_nothing_is_known_is_not_saturated() -> None:
    rig = ChoiceRig(2)
    rig.clock.advance(60)
    assert not saturated(rig)
    assert not saturated(ChoiceRig(0))
