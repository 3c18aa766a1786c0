"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A number depends only on (seed, stream, position), not on earlier numbers or the machine. Therefore a request samples
the same tokens on any worker, in any batch, and after resuming in the middle.
"""

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_U32 = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Compute four random 32-bit words from a 128-bit counter and a 64-bit key, with ten rounds of Philox.

    Args:
        counter: four unsigned 32-bit words.
        key: two unsigned 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _U32, (p0 >> 32) ^ c3 ^ k1, p0 & _U32
        k0, k1 = (k0 + _W0) & _U32, (k1 + _W1) & _U32
    return c0, c1, c2, c3


def uniform(seed: int, stream: int, position: int, draw: int = 0) -> float:
    """Return a random number in [0, 1) with 53 random bits.

    Args:
        seed: the request's seed; only its low 64 bits are used.
        stream: number of the sample within the request; only its low 32 bits are used.
        position: index of the token to sample, counted from the start of the prompt; only its low 32 bits are used.
        draw: number of the draw at this position; draws are independent.
    """
    words = philox4x32((position & _U32, stream & _U32, draw & _U32, 0), (seed & _U32, (seed >> 32) & _U32))
    return ((words[0] << 21) | (words[1] >> 11)) * 2.0**-53
