"""Quarantine bound: limits the share of a block pool's pages that stalled transports may occupy.

A stalled read leaves its pages in quarantine until the transport reports its end, which may never happen. A peer that
stalls every read could thus occupy all pages. Above the bound, new fetches are rejected and their tokens are computed,
which costs time but does not expose further pages to a transport.
"""


def accepts_fetch(*, num_quarantined: int, num_blocks: int, num_pages: int, share: float) -> bool:
    """Return whether a fetch into `num_pages` pages may begin.

    The bound is `share` of the pool's `num_blocks` pages, but at least `num_pages` pages, so that fetches are possible
    in a small pool too: one stalled fetch does not block the next fetch, but two may.

    Args:
        num_quarantined: number of pages in quarantine.
        num_blocks: number of pages of the pool.
        num_pages: number of pages that the fetch writes.
        share: maximum share of the pool in quarantine, 0 to 1.
    """
    return num_quarantined <= 0 or num_quarantined < max(share * num_blocks, num_pages)
