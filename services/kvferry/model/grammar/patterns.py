r"""Prepares the patterns of JSON strings for the compiler, which quotes some character classes wrongly.

llguidance 1.9 writes a class that contains all control characters, such as `[^"]` or `\W`, as `\` followed by any
escape. So `"` and `\` are accepted for a class that excludes them. Therefore one control character, U+001F, is removed
from every class: every output still matches the pattern, and outputs with this character are lost.
"""

import re

from kvferry.core.errors import InvalidRequest, shortened

_REMOVED = r"\x1f"
_SYNTAX = re.compile(
    r"""
    \\ (?: [DWS] | [pP] (?: \{ [^}]* \} | . ) )      (?# a class without brackets)
    | \\ (?: x [0-9A-Fa-f]{2} | [xuU] \{ [0-9A-Fa-f]+ \} | u [0-9A-Fa-f]{4} | U [0-9A-Fa-f]{8} )
    | \\ .
    | [^\\]
    """,
    re.VERBOSE | re.DOTALL,
)
_CLASS = re.compile(r"\\[DWSpP]")
_CODE = re.compile(r"\\[xuU]\{?([0-9A-Fa-f]+)\}?")


def enforceable_pattern(pattern: str) -> str:
    r"""Return a pattern, in the syntax of Rust's `regex` crate, whose classes do not contain U+001F.

    Raises:
        InvalidRequest: the pattern has U+001F itself outside of a class.
    """
    parts = [found.group() for found in _SYNTAX.finditer(pattern)]
    made: list[str] = []
    at = 0
    while at < len(parts):
        part = parts[at]
        end = at + 1
        if part == "[":
            end = _class_end(parts, at)
            made.append(f"[{''.join(parts[at:end])}&&[^{_REMOVED}]]")
        elif _CLASS.match(part):
            made.append(f"[{part}&&[^{_REMOVED}]]")
        elif _is_removed(part):
            raise InvalidRequest(
                f"pattern {shortened(pattern)!r} has the control character U+001F, which is not supported; remove it",
                field="constraint",
                reason="CONSTRAINT_INVALID",
            )
        else:
            made.append(part)
        at = end
    return "".join(made)


def _class_end(parts: list[str], start: int) -> int:
    """Return the index after the bracket that closes the class at `start`; classes may contain classes. The first
    character of a class may be a closing bracket that is meant literally."""
    depth, at = 0, start
    while at < len(parts):
        if parts[at] == "[":
            depth += 1
            if at + 1 < len(parts) and parts[at + 1] == "^":
                at += 1
            if at + 1 < len(parts) and parts[at + 1] == "]":
                at += 1
        elif parts[at] == "]":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return len(parts)  # not closed; the compiler reports it


def _is_removed(part: str) -> bool:
    code = _CODE.fullmatch(part)
    return part == "\x1f" or (code is not None and int(code[1], 16) == 0x1F)
