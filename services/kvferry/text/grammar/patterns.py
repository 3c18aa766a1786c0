r"""Prepares the patterns of JSON strings for the compiler, which quotes some character classes wrongly.

llguidance 1.9 writes a class that contains all control characters, such as `[^"]` or `\W`, as `\` followed by any
escape. So `"` and `\` are accepted for a class that excludes them. Therefore one control character, U+001F, is removed
from every class: every output still matches the pattern, but no output contains this character.
"""

import itertools
import re
from collections.abc import Collection, Sequence

from kvferry.core.errors import shortened
from kvferry.text.grammar.errors import invalid

MAX_NAME = 61
"""Maximum length of a name in `other_names`; each character nests the pattern four levels deeper, of 250."""
_MAX_FLAGS = 16
"""Maximum length of a group's flags; there are 8."""
_REMOVED = r"\x1f"
_SYNTAX = re.compile(
    r"""
    \\ (?: [DWS] | [pP] (?: \{ [^}]{0,64} \} | . ) )      (?# a class without brackets)
    | \\ (?: x [0-9A-Fa-f]{2} | [xuU] \{ [0-9A-Fa-f]{1,64} \} | u [0-9A-Fa-f]{4} | U [0-9A-Fa-f]{8} )
    | \\ .
    | [^\\]
    """,
    re.VERBOSE | re.DOTALL,
)
_DATE = r"[0-9]{4}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HOST = r"[a-z0-9](?:[a-z0-9-]{0,40}[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]{0,40}[a-z0-9])?){0,3}"
_HEX = "[0-9a-fA-F]"
NAME_FORMATS = {
    name: f"^(?:{text})$"
    for name, text in {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}T{_TIME}",
        "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
        "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
        "ipv6": f"{_HEX}{{1,4}}(?::{_HEX}{{1,4}}){{7}}|(?:{_HEX}{{1,4}}:){{1,6}}:{_HEX}{{1,4}}|::1?",
        "hostname": _HOST,
        "email": rf"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+){{0,3}}@{_HOST}",
        "uri": rf"[a-z][a-z0-9+.-]{{0,20}}://{_HOST}(?::[1-9][0-9]{{0,3}})?(?:/[A-Za-z0-9._~-]*)*",
    }.items()
}
"""Patterns of names of members by their format. Each name has the format; unusual spellings are left out, and
29 February as well."""
_CLASS = re.compile(r"\\[DWSpP]")
_CODE = re.compile(r"\\[xuU]\{?([0-9A-Fa-f]+)\}?")


def enforceable_pattern(pattern: str) -> str:
    r"""Return a pattern, in the syntax of Rust's `regex` crate, whose classes do not contain U+001F.

    Raises:
        InvalidRequest: the pattern has U+001F itself outside of a class, or the flag x.
    """
    parts = [found.group() for found in _SYNTAX.finditer(pattern)]
    made: list[str] = []
    at = 0
    while at < len(parts):
        part = parts[at]
        end = at + 1
        if part == "(" and _sets_extended(parts, at + 1):
            raise invalid(f"pattern {shortened(pattern)!r} sets the flag x, which is not supported; remove it")
        if part == "[":
            end = _class_end(parts, at)
            made.append(f"[{_literal_class(parts[at:end])}&&[^{_REMOVED}]]")
        elif _CLASS.match(part):
            made.append(f"[{part}&&[^{_REMOVED}]]")
        elif _is_removed(part):
            raise invalid(
                f"pattern {shortened(pattern)!r} has the control character U+001F, which is not supported; remove it"
            )
        else:
            made.append(part)
        at = end
    return "".join(made)


def without_lookaheads(pattern: str) -> list[str]:
    """Return patterns that hold together for the texts that a pattern matches: lookaheads at its start, `^(?=A)B`, are
    patterns of their own, since the compiler has no lookahead; the last one is the rest of the pattern."""
    parts = [found.group() for found in _SYNTAX.finditer(pattern)]
    if parts[:4] != ["^", "(", "?", "="] or _has_alternatives(parts):
        return [pattern]
    found: list[str] = []
    at = 1
    while parts[at : at + 3] == ["(", "?", "="]:
        end = _group_end(parts, at)
        if end > len(parts):
            break
        found.append(f"^(?:{''.join(parts[at + 3 : end - 1])})")
        at = end
    return [*found, "".join(["^", *parts[at:]])]


def _group_end(parts: list[str], start: int) -> int:
    """Return the index after the bracket that closes the group at `start`; more than the length if none does."""
    depth, at = 0, start
    while at < len(parts):
        if parts[at] == "[":
            at = _class_end(parts, at)
            continue
        depth += {"(": 1, ")": -1}.get(parts[at], 0)
        at += 1
        if not depth:
            return at
    return len(parts) + 1


def _has_alternatives(parts: list[str]) -> bool:
    """Return whether a part of a pattern has alternatives outside of groups."""
    at = 0
    while at < len(parts):
        if parts[at] == "|":
            return True
        at = _class_end(parts, at) if parts[at] == "[" else _group_end(parts, at) if parts[at] == "(" else at + 1
    return False


def other_names(names: Collection[str]) -> str:
    """Return a pattern that matches every string except the given ones, and that the compiler enforces.

    Args:
        names: the strings to exclude, each of at most `MAX_NAME` characters.
    """
    return f"^{_after(sorted(names))}$"


def _after(names: list[str]) -> str:
    """Return a pattern that matches every string except `names`, which are sorted."""
    is_name = names[:1] == [""]
    ways: list[str] = []
    begun: list[str] = []
    for first, group in itertools.groupby(names[is_name:], key=lambda name: name[0]):
        begun.append(f"\\u{{{ord(first):x}}}")
        ways.append(begun[-1] + _after([name[1:] for name in group]))
    ways.append(f"[[^{''.join(begun)}]&&[^{_REMOVED}]](?s:.*)" if begun else "(?s:.+)")
    return f"(?:{'|'.join(ways)}){'' if is_name else '?'}"


def _class_end(parts: list[str], start: int) -> int:
    """Return the index after the bracket that closes the class at `start`. As in ECMA-262, the dialect of JSON Schema,
    an opening bracket in a class is literal; so is a closing one that is the first character, as in Python and Rust."""
    at = start + 1 + (parts[start + 1 : start + 2] == ["^"])
    at += parts[at : at + 1] == ["]"]
    while at < len(parts):
        if parts[at] == "]":
            return at + 1
        at += 1
    return len(parts)  # not closed; the compiler reports it


def _literal_class(parts: list[str]) -> str:
    """Return a class, from bracket to bracket, in which the operators of Rust's classes are literal: nested classes,
    intersection, difference and symmetric difference."""
    inner = [f"\\{part}" if part in ("[", "&", "~") else part for part in parts[1:]]
    places = zip(["", *inner[:-1]], inner, [*inner[1:], ""], strict=True)
    return "[" + "".join("\\-" if part == "-" and "-" in (before, after) else part for before, part, after in places)


def _sets_extended(parts: Sequence[str], start: int) -> bool:
    """Return whether the group with its content from `start` has the flag with which white space and comments are
    ignored. JSON Schema's dialect lacks it."""
    if parts[start : start + 1] != ["?"]:
        return False
    flags = itertools.takewhile(lambda part: part.isalpha() or part == "-", parts[start + 1 : start + 1 + _MAX_FLAGS])
    return "x" in flags


def _is_removed(part: str) -> bool:
    code = _CODE.fullmatch(part)
    return part == "\x1f" or (code is not None and int(code[1], 16) == 0x1F)
