"""The alphabet of byte-level BPE, which represents each of the 256 bytes by a printable character (Radford et al.,
GPT-2, 2019).
"""


def _alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    characters |= {chr(256 + rank): byte for rank, byte in enumerate(others)}
    return characters


BYTE_OF = _alphabet()
"""Byte by printable character."""

CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}
"""Printable character by byte."""


def bytes_of(token: str) -> bytes:
    """Return the bytes of a token; a token with a character outside the alphabet (an added token) is encoded as
    UTF-8."""
    try:
        return bytes(BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode("utf-8")
