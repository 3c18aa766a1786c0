"""Transition tables: allowed and refused transitions, and every state of each machine is reachable and can end."""

from enum import StrEnum

import pytest

from kvferry.core.errors import InvariantBroken
from kvferry.core.states import Machine
from kvferry.engine.schedule.step.sequence import SEQUENCE_MACHINE
from kvferry.gateway.decide.lifecycle.sample_states import MACHINE as SAMPLE_MACHINE
from kvferry.kv.handoff.offers import OFFER_MACHINE
from kvferry.kv.handoff.transfers import TRANSFER_MACHINE


class Door(StrEnum):
    OPEN = "open"
    SHUT = "shut"
    GONE = "gone"


class Act(StrEnum):
    PUSH = "push"
    PULL = "pull"
    BURN = "burn"


DOOR = Machine(
    "door",
    Door.SHUT,
    frozenset({Door.GONE}),
    {
        (Door.SHUT, Act.PUSH): Door.OPEN,
        (Door.OPEN, Act.PULL): Door.SHUT,
        (Door.OPEN, Act.BURN): Door.GONE,
    },
)
OURS = [OFFER_MACHINE, TRANSFER_MACHINE, SEQUENCE_MACHINE, SAMPLE_MACHINE]


def test_a_listed_event_leads_to_the_listed_state() -> None:
    assert DOOR.next(Door.SHUT, Act.PUSH) is Door.OPEN
    assert DOOR.allows(Door.SHUT, Act.PUSH)


def test_an_unlisted_event_is_an_error_that_names_state_event_and_what_would_be_legal() -> None:
    assert not DOOR.allows(Door.OPEN, Act.PUSH)
    with pytest.raises(InvariantBroken, match=r"door: event 'push' is illegal in state 'open'.*\['burn', 'pull'\]"):
        DOOR.next(Door.OPEN, Act.PUSH)


def test_the_diagram_has_every_transition_and_both_ends() -> None:
    assert DOOR.mermaid().splitlines() == [
        "stateDiagram-v2",
        "    [*] --> shut",
        "    shut --> open: push",
        "    open --> shut: pull",
        "    open --> gone: burn",
        "    gone --> [*]",
    ]


@pytest.mark.parametrize("machine", OURS, ids=lambda m: m.name)
def test_our_machines_reach_every_state_and_always_an_end(machine: Machine[StrEnum, StrEnum]) -> None:
    after: dict[StrEnum, set[StrEnum]] = {s: set() for s in type(machine.initial)}
    for (state, _), target in machine.table.items():
        after[state].add(target)

    def reachable(start: StrEnum) -> set[StrEnum]:
        seen, todo = {start}, [start]
        while todo:
            fresh = after[todo.pop()] - seen
            seen |= fresh
            todo += fresh
        return seen

    assert reachable(machine.initial) == set(after), "a state has no transition into it"
    for state in after:
        assert reachable(state) & machine.final, f"no final state can be reached from {state}"
        assert (after[state] == set()) == (state in machine.final), (
            f"{state}: exactly the final states have no transitions out of them"
        )
