"""Definition of a setting, and dataclasses whose fields are settings."""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from kvferry.core.errors import UsageError, shortened
from kvferry.core.settings.parsers import TEXT, Parser, share, size_bytes, size_or_auto, whole

ENVIRONMENT_PREFIX = "KVFERRY_"
_METADATA = "setting"
_MAX_SIZE = 1 << 50
"""Largest size in bytes."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Definition of one setting."""

    name: str
    """Name in lower case with underscores; the flag uses hyphens, the environment variable upper case."""
    default: object
    help: str
    """Help text, with the unit."""
    parse: Parser[Any] = TEXT
    """Converts text to a value and back; raises ValueError if the text is invalid."""
    choices: tuple[str, ...] = ()
    registry: str = ""
    """Registry whose names are the choices, for choices that are registered in another package: `connectors`,
    `routing policies`, `call parsers` or `reasoning parsers`."""
    is_repeated: bool = False
    """Whether the flag may be repeated; values are comma-separated in the environment and a list in the file."""
    is_secret: bool = False
    """Whether the value is hidden in output. Secrets have no flag, since other users can read a process's arguments."""

    @property
    def flag(self) -> str:
        """Command-line flag of the setting."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Environment variable of the setting."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    def shown(self, value: Any) -> str:
        """Return a value as text that `parse` accepts, with its unit; the values of a repeated setting with commas."""
        return ",".join(map(self.parse.show, value)) if self.is_repeated else self.parse.show(value)


@dataclass(frozen=True, slots=True)
class Checked:
    """A field of a dataclass that is a setting, and its check."""

    help: str
    check: Callable[[object], object]
    """Function that returns the value, converted from text where the setting is a size; raises ValueError with what the
    value must be."""
    parse: Parser[Any] = TEXT
    choices: tuple[str, ...] = ()


def number(default: int, about: str, *, low: int, high: int) -> Any:
    """Return a field for a whole number from `low` to `high`."""

    def check(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return value

    return _field(default, Checked(about, check, whole(low, high)))


def size(default: int, about: str, *, is_auto: bool = False) -> Any:
    """Return a field for a size in bytes, which may be given as text such as `512MiB`.

    Args:
        default: size in bytes.
        about: help text.
        is_auto: whether 0 is valid, and means a size that the engine chooses.
    """
    parse = size_or_auto if is_auto else size_bytes

    def check(value: object) -> object:
        try:
            found = parse(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(f"a size such as 512MiB ({error})") from error
        if isinstance(found, bool) or not isinstance(found, int) or not (0 if is_auto else 1) <= found <= _MAX_SIZE:
            raise ValueError(f"a size in bytes from {0 if is_auto else 1} to {_MAX_SIZE}, or text such as 512MiB")
        return found

    return _field(default, Checked(about, check, parse))


def fraction(default: float, about: str, *, may_be_zero: bool = False) -> Any:
    """Return a field for a share from 0 to 1; 0 is valid only if `may_be_zero`."""
    bounds = "from 0 to 1" if may_be_zero else "above 0 and at most 1"

    def check(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(bounds)
        if not 0.0 <= value <= 1.0 or not (may_be_zero or value):
            raise ValueError(bounds)
        return value

    return _field(default, Checked(about, check, share(may_be_zero=may_be_zero)))


def choice(default: str, about: str, choices: tuple[str, ...]) -> Any:
    """Return a field for one of several words."""

    def check(value: object) -> object:
        if value not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return value

    return _field(default, Checked(about, check, choices=choices))


def text(default: str, about: str, parse: Parser[Any] = TEXT) -> Any:
    """Return a field for text that `parse` accepts."""

    def check(value: object) -> object:
        if not isinstance(value, str):
            raise ValueError("a string")
        try:
            parse(value)
        except ValueError as error:
            raise ValueError(str(error).removeprefix("must be ")) from error
        return value

    return _field(default, Checked(about, check, parse))


def _field(default: object, checked: Checked) -> Any:
    return field(default=default, metadata={_METADATA: checked})


def settings_of(kind: type) -> tuple[Setting, ...]:
    """Return the settings that are fields of a dataclass, in order."""
    found = []
    for one in fields(kind):
        checked: Checked | None = one.metadata.get(_METADATA)
        if checked is not None:
            assert one.default is not MISSING, "a setting has a default"
            found.append(Setting(one.name, one.default, checked.help, checked.parse, checked.choices))
    return tuple(found)


def check_settings(settings: Any) -> None:
    """Check the fields of a dataclass that are settings, and convert sizes from text.

    Raises:
        UsageError: a value is not valid; the message has the setting, the value and the valid values.
    """
    for one in fields(settings):
        checked: Checked | None = one.metadata.get(_METADATA)
        if checked is None:
            continue
        value = getattr(settings, one.name)
        try:
            found = checked.check(value)
        except ValueError as error:
            raise UsageError(f"{one.name} must be {error}, not {shortened(repr(value))}", field=one.name) from None
        if found is not value:
            object.__setattr__(settings, one.name, found)


def check_names(given: Iterable[str], known: tuple[str, ...]) -> None:
    """Check that all names of settings are known.

    Raises:
        UsageError: a name is unknown; the message suggests a similar one.
    """
    for name in given:
        if name not in known:
            similar = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {similar[0]}?" if similar else f"known settings are {', '.join(sorted(known))}"
            raise UsageError(f"unknown setting {shortened(name)!r}; {hint}", field=shortened(name))
