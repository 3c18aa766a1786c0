"""Parses TOML written by users: one exception for all errors, and bounded time and memory."""

import re
import tomllib
from typing import Any

_MAX_DOTS = 256
_ENDS_OF_KEYS = re.compile(r"[\n=,{}\[\]]")


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a document.

    Raises:
        ValueError: it is not TOML, has a number of more than 4,300 digits, or is nested too deeply.
    """
    # The time and the memory of `tomllib` grow with the square of the number of parts of a dotted key.
    if any(part.count(".") > _MAX_DOTS for part in _ENDS_OF_KEYS.split(text)):
        raise ValueError(f"a key or a value has more than {_MAX_DOTS} dots")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:
        raise ValueError("a number has too many digits") from None
