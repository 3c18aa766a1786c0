"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A draw depends on (seed, stream, position) alone, never on what was drawn before or on which machine,
so a request's sampled tokens do not change when it moves, shares a batch or starts again in the middle.
"""

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_U32 = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox: four 32-bit words from a 128-bit counter and a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _U32, (p0 >> 32) ^ c3 ^ k1, p0 & _U32
        k0, k1 = (k0 + _W0) & _U32, (k1 + _W1) & _U32
    return c0, c1, c2, c3


def uniform(seed: int, stream: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits.

    Args:
        seed: the request's seed; its low 64 bits count.
        stream: which of the request's samples (`n`); its low 32 bits count.
        position: index of the token to draw, counted from the start of the prompt; its low 32 bits count.
    """
    words = philox4x32((position & _U32, stream & _U32, 0, 0), (seed & _U32, (seed >> 32) & _U32))
    return ((words[0] << 21) | (words[1] >> 11)) * 2.0**-53
