"""The numbers of hand-offs that a gateway reports to the operator."""

from kvferry.gateway.observe.instruments import Instruments


def test_rejected_tickets_are_hand_offs_and_those_with_an_unknown_key_are_counted_apart() -> None:
    instruments = Instruments()
    assert instruments.handoff_counts() == {}
    instruments.peer_loads.labels("fetched").inc(5)
    instruments.peer_loads.labels("failed").inc()
    for reason, times in (("TICKET_KEY_UNKNOWN", 3), ("TICKET_GONE", 2), ("TICKET_LAYOUT", 1), ("UNAVAILABLE", 9)):
        instruments.retries.labels(reason).inc(times)
    assert instruments.handoff_counts() == {"fetched": 5, "failed": 1, "key_unknown": 3, "rejected": 3}
