"""Digests of page contents, for detecting corruption in a transfer between two workers.

XXH3 with 128 bits (Collet, xxHash) detects corruption at memory speed. It does not protect against forgery, but the
digests are part of sealed tickets.
"""

from collections.abc import Sequence

from xxhash import xxh3_128_digest

DIGEST_BYTES = 16


def page_digests(pages: memoryview, block_bytes: int, block_ids: Sequence[int]) -> tuple[bytes, ...]:
    """Compute the digest of each page, `DIGEST_BYTES` long.

    Args:
        pages: memory that consists of whole pages of `block_bytes` each.
        block_bytes: bytes of one page.
        block_ids: indices of the pages in `pages`.
    """
    return tuple(xxh3_128_digest(pages[i * block_bytes : (i + 1) * block_bytes]) for i in block_ids)
