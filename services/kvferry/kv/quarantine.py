"""How much of a pool may wait for transports that do not let go, before no more is risked.

A read that stalls leaves its pages in quarantine until the transport says that it is finished, which may be never. A
peer that stalls every read would so take page after page. Above the bound new fetches are declined and their tokens
computed; that costs time, and needs no page that a transport could keep.
"""


def accepts_fetch(*, num_quarantined: int, num_blocks: int, num_wanted: int, share: float) -> bool:
    """Whether a fetch into `num_wanted` pages may begin.

    At most `share` of the pool's `num_blocks` pages, but always one such request's worth, so that a small pool can
    fetch too: a first stalled fetch never keeps the next one from trying, a second one may.
    """
    return num_quarantined <= 0 or num_quarantined < max(share * num_blocks, num_wanted)
