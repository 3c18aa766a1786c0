"""Limit of the number of pages that wait for stalled transports."""

import pytest

from kvferry.kv.handoff.quarantine import accepts_fetch


@pytest.mark.parametrize(
    ("quarantined", "blocks", "wanted", "accepted"),
    [
        (0, 10, 10, True),  # an empty quarantine accepts even a request as large as the pool
        (3, 20, 4, True),  # fewer pages than one request
        (4, 20, 4, False),
        (5, 20, 4, False),
        (49, 1000, 4, True),  # below 5 % of a large pool
        (50, 1000, 4, False),
    ],
)
def test_five_percent_or_one_request(quarantined: int, blocks: int, wanted: int, accepted: bool) -> None:
    assert accepted == accepts_fetch(num_quarantined=quarantined, num_blocks=blocks, num_pages=wanted, share=0.05)
