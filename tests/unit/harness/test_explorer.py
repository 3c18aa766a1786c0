"""The explorer: the production state machines hold in every small scenario, and every mutation is detected."""

import copy
import dataclasses
from collections import Counter

import pytest
from harness.explorer import copies
from harness.explorer.__main__ import main
from harness.explorer.choices import choices
from harness.explorer.mutations import MUTATIONS, Mutation
from harness.explorer.parts import PRODUCTION
from harness.explorer.scenario import SCENARIOS, Scenario, scenario
from harness.explorer.search import explore, replay, walk
from harness.explorer.shrink import shrink
from harness.explorer.world import World, label

from kvferry.core.states import Machine
from kvferry.gateway.decide.lifecycle.sample_states import MACHINE as SAMPLE_MACHINE
from kvferry.kv.handoff.offers import OFFER_MACHINE, OfferEvent
from kvferry.kv.handoff.transfers import TRANSFER_MACHINE, TransferEvent, TransferState

MAX_STATES = 200_000
LARGE = {"reuse", "tight", "prefix"}
"""Scenarios explored completely by `make explore` only; here up to a number of states, and by random walks."""


SMALL = [s for s in SCENARIOS if not s.is_large]


@pytest.mark.parametrize("world", SMALL, ids=lambda s: s.name)
def test_the_machine_holds_in_every_state_of_a_small_world(world: Scenario) -> None:
    limit = 20_000 if world.name in LARGE else MAX_STATES
    found = explore(world, PRODUCTION, max_states=limit)
    assert found.violation is None, [label(action) for action in found.trace]
    assert found.is_complete or world.name in LARGE


@pytest.mark.parametrize("world", SCENARIOS, ids=lambda s: s.name)
def test_the_machine_holds_on_random_walks_with_more_faults(world: Scenario) -> None:
    found = walk(dataclasses.replace(world, faults=5), PRODUCTION, seed=1, walks=150)
    assert found.violation is None, [label(action) for action in found.trace]
    assert found.states == 150


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_broken_rule_is_noticed(mutation: Mutation) -> None:
    found = explore(scenario(mutation.scenario), mutation.parts, max_states=MAX_STATES)
    assert found.violation is not None
    labels = [label(action) for action in found.trace]
    again = replay(scenario(mutation.scenario), mutation.parts, labels)
    assert again.violation == found.violation, "a replay of the printed trace has the same violation"


def test_there_are_many_mutations_and_each_has_its_own_name() -> None:
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS) >= 25


def test_the_scenarios_cover_the_tables_of_the_state_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: set[tuple[str, str, str]] = set()
    following = Machine.next

    def noted(machine: Machine, state: object, event: object) -> object:  # type: ignore[type-arg]
        taken.add((machine.name, str(state), str(event)))
        return following(machine, state, event)

    monkeypatch.setattr(Machine, "next", noted)
    for world in SMALL:
        if world.name not in LARGE:
            explore(world, PRODUCTION, max_states=6_000)
    for world in SCENARIOS:
        walk(dataclasses.replace(world, faults=4), PRODUCTION, seed=7, walks=100)
    not_reached = {
        "offer": {OfferEvent.SPENT},  # follows several failures, see tests/unit/kv/handoff/test_offers.py
        "transfer": {(TransferState.QUEUED, TransferEvent.GIVE_UP)},  # the workers of the scenarios have no queue
        "sample": {
            "fail",  # happens when no worker is left
            # The gateway of the scenarios leaves these states at once, and always gets the outcome of a hand-off.
            *((state, event) for state in ("queued", "offered") for event in ("finish", "cancel")),
            ("fetching", "finish"),
        },
    }
    for machine in (OFFER_MACHINE, TRANSFER_MACHINE, SAMPLE_MACHINE):
        excused = not_reached[machine.name]
        wanted = {(s, e) for s, e in machine.table if e not in excused and (s, e) not in excused}
        missed = {(s, e) for s, e in wanted if (machine.name, str(s), str(e)) not in taken}
        assert not missed, machine.name


def test_requests_are_both_fetched_and_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: Counter[str] = Counter()
    send = World.send

    def noted(world: World, message: object) -> None:
        if message.kind == "decoded":  # type: ignore[attr-defined]
            outcomes[message.body[1]] += 1  # type: ignore[attr-defined]
        send(world, message)  # type: ignore[arg-type]

    monkeypatch.setattr(World, "send", noted)
    explore(scenario("everything"), PRODUCTION, max_states=MAX_STATES)
    assert min(outcomes["fetched"], outcomes["recomputed"]) > 20


def test_a_long_failing_walk_is_shrunk_to_what_is_needed() -> None:
    mutation = next(m for m in MUTATIONS if m.name == "epochs not compared")
    world = scenario(mutation.scenario)
    found = walk(world, mutation.parts, seed=3, walks=5_000)
    assert found.violation is not None
    short = shrink(world, mutation.parts, found)
    assert short.violation is not None
    assert len(short.trace) <= min(len(found.trace), 16)
    labels = [label(action) for action in short.trace]
    for left_out in range(len(labels)):
        rest = replay(world, mutation.parts, labels[:left_out] + labels[left_out + 1 :])
        assert rest.violation is None or len(rest.trace) >= len(labels)


def test_equal_seeds_walk_equal_ways() -> None:
    world = dataclasses.replace(scenario("everything"), faults=4)
    one, two = (walk(world, PRODUCTION, seed=5, walks=20) for _ in range(2))
    assert (one.steps, one.depth) == (two.steps, two.depth)


def test_a_copy_of_a_world_shares_nothing_with_it() -> None:
    """Also detects a field of a machine that `copies` does not copy, because the field would be shared or missing."""
    world = World(scenario("everything"), PRODUCTION)
    for step in range(15):
        action = choices(world)[0]
        before = world.fingerprint()
        child = world.clone()
        child.apply(action)
        assert world.fingerprint() == before, (step, label(action))
        deep = copy.deepcopy({name: actor.state(world.now) for name, actor in world.actors.items()})
        child.apply(choices(child)[0])
        assert deep == {name: actor.state(world.now) for name, actor in world.actors.items()}
        world.apply(action)


def test_the_copies_cover_every_field_of_the_machines() -> None:
    world = World(scenario("everything"), PRODUCTION)
    while not any(load.attempt for load in world.actors["D0"].loads.values()):
        world.apply(choices(world)[0])
    prefill, decode = world.actors["P"], world.actors["D0"]
    attempt = next(iter(decode.loads.values())).attempt
    known = {
        "OfferBook": ({"times", "_offers", "_early"}, vars(prefill.book)),
        "Attempt": (
            {
                *("source", "remote", "local", "state", "_promised", "_connector", "_num_bytes", "_times", "_begun"),
                *("_limit", "_stall_at", "_progress", "_renew_at", "_lease_seconds"),
                *("expected_digests", "_requires_digests"),
            },
            vars(attempt),
        ),
        "BlockPool": (
            {
                *("num_blocks", "epochs", "_on_reuse", "_refs", "_writers", "_head", "_next", "_prev"),
                *("num_free", "num_quarantined"),
            },
            vars(decode.pool),
        ),
    }
    for name, (fields, found) in known.items():
        assert set(found) == fields, f"the fields of {name} have changed: update {copies.__name__}, then this test"


def test_the_command_line(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scenario", "messages"]) == 0
    assert "complete" in capsys.readouterr().out
    assert main(["--mutation", "no lease timer"]) == 1
    printed = capsys.readouterr().out
    assert "P still holds resources forever" in printed
    trace = tmp_path / "trace.txt"  # type: ignore[operator]
    trace.write_text(printed.partition("  after\n")[2])
    assert main(["--mutation", "no lease timer", "--replay", str(trace)]) == 1
    assert main(["--scenario", "messages", "--replay", str(trace)]) == 0, "the unchanged machine passes"
    assert main(["--mutation", "no such"]) == 2
    assert main(["--scenario", "messages", "--walks", "3", "--faults", "1"]) == 0
