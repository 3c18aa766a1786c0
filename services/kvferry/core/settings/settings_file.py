"""Writes resolved settings as a TOML file from which they can be read again."""

import json
import re
from collections.abc import Iterable

from kvferry.core.settings.resolve import DEFAULT_SOURCE, Resolved
from kvferry.core.settings.topics import TOPICS, topic_of

_CREDENTIALS = re.compile(r"://[^/@\s]*@")
"""User and password in a URL."""
_COLUMN = 48
"""Column of the comment with the source of a value, if the value is shorter."""


def settings_file(resolved: Iterable[Resolved]) -> str:
    """Return settings as TOML: values that are set, with their sources as comments, and defaults as comments, so that
    the file keeps its meaning when a default changes.

    Secrets, passwords in URLs and values that TOML cannot contain are left out, with a comment.

    Args:
        resolved: the settings of a command.
    """
    rows = list(resolved)
    lines = ["# Save this as a file for --config. Lines that begin with # have no effect; they show the defaults."]
    for topic in TOPICS:
        found = [one for one in rows if topic_of(one.setting.name) == topic]
        if found:
            lines += ["", f"# {topic}", *map(_line, found)]
    return "\n".join(lines) + "\n"


def _line(found: Resolved) -> str:
    setting = found.setting
    is_default = found.source == DEFAULT_SOURCE
    note = "default" if is_default else f"from {_printable(found.source)}"
    if setting.is_secret:
        told = "not set" if is_default else f"{note}, not shown"
        return f"# {setting.name} is a secret ({told}); set {setting.variable}"
    values = found.value if setting.is_repeated else [found.value]
    shown = [setting.parse.show(value) for value in values]
    if any(_CREDENTIALS.search(text) for text in shown):
        return f"# {setting.name} has a URL with a password ({note}, not shown); set {setting.variable}"
    try:
        written = [_toml(value, text) for value, text in zip(values, shown, strict=True)]
    except UnicodeEncodeError:
        return f"# {setting.name} is not UTF-8 ({note}); set {setting.variable}"
    text = f"[{', '.join(written)}]" if setting.is_repeated else written[0]
    return f"{'# ' if is_default else ''}{setting.name} = {text}".ljust(_COLUMN) + f"  # {note}"


def _toml(value: object, shown: str) -> str:
    """Return a value of TOML; sizes and other values with units are strings.

    Raises:
        UnicodeEncodeError: the text is not Unicode, such as a path with other bytes.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float) and shown in (str(value), f"{value:g}"):
        return str(value)
    shown.encode()
    return json.dumps(shown, ensure_ascii=False).replace("\x7f", "\\u007f")


def _printable(source: str) -> str:
    """Return a source without characters that a comment of TOML cannot have."""
    return "".join(one if one.isprintable() else ascii(one).strip("'") for one in source)
