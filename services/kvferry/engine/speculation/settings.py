"""The setting `speculation`: a method with parameters, such as `ngram?k=5`."""

from dataclasses import dataclass
from urllib.parse import parse_qsl

from kvferry.core.errors import UsageError

OFF, AUTO, NGRAM, SUFFIX = "off", "auto", "ngram", "suffix"
_NOT_IMPLEMENTED = ("draft", "medusa", "eagle")
MAX_DRAFT_TOKENS = 32
_DEFAULTS = {AUTO: {"k": 16}, SUFFIX: {"k": 16}, NGRAM: {"k": 5, "min": 2, "max": 5}, OFF: {}}


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Method of speculation and its parameters."""

    method: str
    """`off`, `auto`, `ngram` or `suffix`."""
    num_drafts: int = 0
    """Maximum draft tokens of a sequence in a step."""
    min_match: int = 2
    """Minimum length of a match in tokens."""
    max_match: int = 5
    """Maximum length of a match that `ngram` compares, in tokens."""


def parse_speculation(text: str) -> SpeculationSettings:
    """Parse the setting: `off`, `auto`, `suffix` or `ngram`, each but `off` with `?k=`, the maximum draft tokens of a
    sequence in a step; `ngram` also with `&min=` and `&max=`, the lengths of matches.

    Raises:
        UsageError: the method or a parameter is unknown, not a number, or out of range.
    """
    method, _, query = text.partition("?")
    name = method.partition("=")[0]
    if name in _NOT_IMPLEMENTED:
        raise UsageError(
            f"speculation {name!r} is not implemented; expected off, auto, suffix or ngram?k=5", field="speculation"
        )
    if method not in _DEFAULTS:
        raise UsageError(f"unknown speculation {text!r}; expected off, auto, suffix or ngram?k=5", field="speculation")
    values = dict(_DEFAULTS[method])
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in values:
            known = ", ".join(values) or "none"
            raise UsageError(
                f"unknown parameter {key!r} of speculation {method!r}; known: {known}", field="speculation"
            )
        if not (value.isascii() and value.isdigit() and 1 <= int(value) <= MAX_DRAFT_TOKENS):
            raise UsageError(
                f"parameter {key}={value[:20]!r} of speculation {method!r} must be a whole number from 1 to "
                f"{MAX_DRAFT_TOKENS}",
                field="speculation",
            )
        values[key] = int(value)
    least, most = values.get("min", 2), values.get("max", 5)
    if least > most:
        raise UsageError(f"min={least} of speculation {method!r} is above max={most}", field="speculation")
    return SpeculationSettings(method, values.get("k", 0), least, most)


def checked_speculation(text: str) -> str:
    """Check the setting and return it.

    Raises:
        ValueError: the method or a parameter is unknown or out of range.
    """
    try:
        parse_speculation(text)
    except UsageError as error:
        raise ValueError(str(error)) from error
    return text
