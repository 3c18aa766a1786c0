import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import InvariantBroken
from kvferry.gateway.decide.lifecycle.sample_states import DUTIES, MACHINE, Duty, SampleEvent, State

_ENDS = (SampleEvent.FINISH, SampleEvent.FAIL, SampleEvent.CANCEL)


def walk(events: list[SampleEvent]) -> tuple[State, bool, bool]:
    """Return the state, whether a ticket is valid, and whether a call is open, computed from the events alone."""
    state, ticket, call = MACHINE.initial, False, False
    for event in events:
        if state in MACHINE.final or not MACHINE.allows(state, event) or event in _ENDS:
            continue
        state = MACHINE.next(state, event)
        match event:
            case SampleEvent.OFFER:
                ticket, call = True, False
            case SampleEvent.CALL_PREFILL | SampleEvent.CALL_DECODE:
                call = True
            case SampleEvent.LOSE:
                call = False
            case SampleEvent.FETCH | SampleEvent.DROP:
                ticket = False
    return state, ticket, call


@given(st.lists(st.sampled_from(list(SampleEvent)), max_size=30))
def test_every_state_has_exactly_the_duties_for_its_open_resources(events):
    state, ticket, call = walk(events)
    duties = DUTIES[state]
    assert (Duty.RELEASE_TICKET in duties) == ticket
    assert (Duty.CANCEL_PREFILL in duties or Duty.CANCEL_DECODE in duties) == call


def test_a_reader_is_cancelled_before_its_ticket_is_released():
    assert DUTIES[State.FETCHING] == (Duty.CANCEL_DECODE, Duty.RELEASE_TICKET)


@pytest.mark.parametrize("state", [s for s in State if s not in MACHINE.final])
def test_every_live_state_can_fail_and_be_cancelled(state):
    assert MACHINE.next(state, SampleEvent.FAIL) is State.FAILED
    assert MACHINE.next(state, SampleEvent.CANCEL) is State.CANCELLED


def test_final_states_have_no_transitions_and_every_state_has_duties():
    assert not [key for key in MACHINE.table if key[0] in MACHINE.final]
    assert set(DUTIES) == set(State)


def test_an_offer_cannot_be_dropped_without_a_release():
    with pytest.raises(InvariantBroken):
        MACHINE.next(State.OFFERED, SampleEvent.FINISH)
    with pytest.raises(InvariantBroken):
        MACHINE.next(State.OFFERED, SampleEvent.LOSE)
