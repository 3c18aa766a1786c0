"""Resolves settings from four sources and records the source of each value.

Precedence: flag, environment (`KVFERRY_<NAME>`), TOML file, default. An invalid value is an error that contains the
setting, the source and the remedy; the default is never used instead.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.core.errors import UsageError

ENVIRONMENT_PREFIX = "KVFERRY_"

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """Definition of one setting."""

    name: str
    """Name in lower case with underscores; the flag uses hyphens, the environment variable upper case."""
    default: object
    help: str
    """Help text, with the unit."""
    parse: Callable[[str], object] = str
    """Function that converts text to a value; raises ValueError if the text is invalid."""
    choices: tuple[str, ...] = ()
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


@dataclass(frozen=True, slots=True)
class Resolved:
    """A setting's value and its source."""

    setting: Setting
    value: Any
    source: str


def resolve(
    settings: Sequence[Setting],
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    file: Mapping[str, object],
    file_name: str = "",
) -> dict[str, Resolved]:
    """Resolve each setting by precedence: flag, environment variable, settings file, default.

    Args:
        settings: the settings of the command.
        flags: values of the command line by setting; `None` or an empty sequence if the flag is not set.
        environment: environment variables by name.
        file: values of the settings file by setting.
        file_name: path of the settings file, for errors.

    Raises:
        UsageError: a value is invalid, or the file has an unknown setting.
    """
    known = {s.name for s in settings}
    for name in file:
        if name not in known:
            raise UsageError(
                f"{file_name}: unknown setting {name!r}; known settings are {', '.join(sorted(known))}", field=name
            )
    found: dict[str, Resolved] = {}
    for setting in settings:
        given = flags.get(setting.name)
        if given is not None and given not in ([], ()):
            value, source = given, setting.flag
        elif setting.variable in environment:
            value, source = environment[setting.variable], setting.variable
        elif setting.name in file:
            value, source = file[setting.name], file_name
        else:
            found[setting.name] = Resolved(setting, setting.default, "default")
            continue
        found[setting.name] = Resolved(setting, _read(setting, value, source), source)
    return found


def _read(setting: Setting, value: object, source: str) -> object:
    if setting.is_repeated:
        items = value if isinstance(value, list | tuple) else [v for v in str(value).split(",") if v]
        return [_read_one(setting, item, source) for item in items]
    return _read_one(setting, value, source)


def _read_one(setting: Setting, value: object, source: str) -> object:
    try:
        parsed = setting.parse(value) if isinstance(value, str) else setting.parse(str(value))
    except ValueError as error:
        if setting.is_secret:  # do not show the value or an error message that may quote it
            raise UsageError(f"{source}: the value is invalid; {setting.help}", field=setting.name) from None
        raise UsageError(f"{source}: {value!r} is invalid ({error}); {setting.help}", field=setting.name) from error
    if setting.choices and parsed not in setting.choices:
        raise UsageError(f"{source}: {value!r} is not one of {', '.join(setting.choices)}", field=setting.name)
    return parsed


def whole(low: int, high: int) -> Callable[[str], int]:
    """Return a parser for integers from `low` to `high`; it raises ValueError for any other text."""

    def parse(text: str) -> int:
        number = int(text)
        if not low <= number <= high:
            raise ValueError(f"must be between {low} and {high}")
        return number

    return parse


def seconds(low: float, high: float) -> Callable[[str], float]:
    """Return a parser for durations from `low` to `high` seconds; it raises ValueError for any other text."""

    def parse(text: str) -> float:
        number = float(text)
        if not low <= number <= high:  # also rejects NaN
            raise ValueError(f"must be between {low:g} and {high:g} seconds")
        return number

    return parse


def size_bytes(text: str) -> int:
    """Parse a size in bytes, for example `512MiB`, `2GiB` or `1000000`.

    Raises:
        ValueError: the text is invalid; the message states the accepted values.
    """
    stripped = text.strip()
    digits = stripped.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = stripped[len(digits) :].strip().lower()
    if unit not in _UNITS:
        raise ValueError(f"unknown unit {unit!r}; use KiB, MiB or GiB")
    number = int(float(digits) * _UNITS[unit])
    if number <= 0:
        raise ValueError("must be greater than 0")
    return number


def size_or_auto(text: str) -> int:
    """Parse a size in bytes, or `auto`, which is 0."""
    return 0 if text.strip().lower() in ("auto", "0") else size_bytes(text)


def share(*, may_be_zero: bool = False) -> Callable[[str], float]:
    """Return a parser for shares: numbers up to 1 that are greater than 0, or at least 0 if `may_be_zero`. It raises
    ValueError for any other text."""

    def parse(text: str) -> float:
        number = float(text)
        if not 0 <= number <= 1 or (number == 0 and not may_be_zero):  # also rejects NaN
            raise ValueError(f"must be {'between 0 and 1' if may_be_zero else 'greater than 0 and at most 1'}")
        return number

    return parse


def device_name(text: str) -> str:
    """Parse `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises:
        ValueError: the text is invalid; the message states the accepted values.
    """
    name, colon, number = text.partition(":")
    if text in ("auto", "cpu", "cuda") or (name == "cuda" and colon and number.isdecimal() and len(number) < 4):
        return text
    raise ValueError("must be auto, cpu, cuda or cuda:N, for example cuda:1")


def boolean(text: str) -> bool:
    """Parse `true` or `false` in their usual spellings.

    Raises:
        ValueError: the text is invalid; the message states the accepted values.
    """
    lowered = text.strip().lower()
    if lowered in {"1", "true", "yes", "on"}:
        return True
    if lowered in {"0", "false", "no", "off"}:
        return False
    raise ValueError("must be true or false")
