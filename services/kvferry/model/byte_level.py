"""Byte-level BPE's alphabet: each of the 256 bytes written as one printable character (Radford et al., GPT-2, 2019)."""


def _alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    characters |= {chr(256 + rank): byte for rank, byte in enumerate(others)}
    return characters


BYTE_OF = _alphabet()
"""Character to byte."""

CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}
"""Byte to character."""


def bytes_of(token: str) -> bytes:
    """What a token stands for. One with a character outside the alphabet (an added token) stands for its own UTF-8."""
    try:
        return bytes(BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode("utf-8")
