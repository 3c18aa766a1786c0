"""Decodes MessagePack from other workers."""

from typing import TypeVar

import msgspec

T = TypeVar("T")


def unpacked(data: bytes, kind: type[T]) -> T:
    """Decode a MessagePack document of the given type.

    Args:
        data: the document.
        kind: type of the result.

    Raises:
        msgspec.DecodeError: the bytes are not such a document. The library itself raises other errors for text that is
            not UTF-8 and for deep nesting.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UnicodeDecodeError:
        raise msgspec.DecodeError("invalid MessagePack: a string is not UTF-8") from None
    except RecursionError:
        raise msgspec.DecodeError("invalid MessagePack: nested too deeply") from None
