"""The numbers of hand-offs that a gateway reports to the operator and to Prometheus."""

import pytest

from kvferry.core.errors import TicketRejected
from kvferry.core.handoffs import HandoffOutcome
from kvferry.core.inference.chunks import KvReport
from kvferry.gateway.observe.instruments import GatewayInstruments


def test_rejected_tickets_are_hand_offs_and_those_with_an_unknown_key_are_counted_apart() -> None:
    instruments = GatewayInstruments()
    assert instruments.handoff_counts() == {}
    instruments.handoffs.labels(HandoffOutcome.FETCHED).inc(5)
    for reason, times in (("TICKET_KEY_UNKNOWN", 3), ("TICKET_GONE", 2), ("TICKET_LAYOUT", 1)):
        for _ in range(times):
            instruments.ticket_rejected(TicketRejected("no", reason=reason))
    assert instruments.handoff_counts() == {"fetched": 5, "key_unknown": 3, "rejected": 3}


def test_reads_of_a_prior_turn_are_hand_offs_and_loads_from_a_tier_are_not() -> None:
    instruments = GatewayInstruments()
    instruments.prior_turn_reported(
        [
            KvReport("p0", "peer", num_tokens=32, num_chosen=32),
            KvReport("p0", "peer", num_tokens=32, num_chosen=32, failure="reset"),
            KvReport("p0", "peer", num_tokens=32),
            KvReport("p0", "disk", num_tokens=32, num_chosen=32),
        ]
    )
    assert instruments.handoff_counts() == {"fetched": 1, "failed": 1, "recomputed": 1}


def test_a_counter_refuses_a_value_that_the_table_does_not_have() -> None:
    instruments = GatewayInstruments()
    with pytest.raises(ValueError, match="outcome of kvferry_gateway_handoffs_total has no value 'lost'"):
        instruments.handoffs.labels("lost")
    instruments.retries.labels("ANY_REASON").inc()
