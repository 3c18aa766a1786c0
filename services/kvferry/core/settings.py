"""Settings: one value, four places it can come from, and which place it was.

Order: flag, environment (`KVFERRY_<NAME>`), TOML file, default. A value that cannot be read is an error that
names the setting, the place and the remedy; it is never replaced by the default.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.core.errors import UsageError

ENVIRONMENT_PREFIX = "KVFERRY_"

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that can be set."""

    name: str
    """Lower case with underscores; the flag has hyphens, the environment upper case."""
    default: object
    help: str
    """With the unit."""
    parse: Callable[[str], object] = str
    """From text; raises ValueError."""
    choices: tuple[str, ...] = ()
    is_repeated: bool = False
    """May be given several times; in the environment with commas, in the file as a list."""
    is_secret: bool = False
    """Never shown, and no flag: other users of a machine can read a process's arguments."""

    @property
    def flag(self) -> str:
        """As on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """As in the environment."""
        return ENVIRONMENT_PREFIX + self.name.upper()


@dataclass(frozen=True, slots=True)
class Resolved:
    """A value and where it came from."""

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
    """Each setting's value by the order above. In `flags`, `None` and an empty sequence mean not given.

    Raises:
        UsageError: a value cannot be read, or the file names a setting that does not exist.
    """
    known = {s.name for s in settings}
    for name in file:
        if name not in known:
            raise UsageError(
                f"{file_name}: there is no setting {name!r}; known are {', '.join(sorted(known))}", field=name
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
        if setting.is_secret:  # neither the value nor an error that may quote it
            raise UsageError(f"{source}: its value is not valid; {setting.help}", field=setting.name) from None
        raise UsageError(f"{source}: {value!r} is not valid ({error}); {setting.help}", field=setting.name) from error
    if setting.choices and parsed not in setting.choices:
        raise UsageError(f"{source}: {value!r} is not one of {', '.join(setting.choices)}", field=setting.name)
    return parsed


def whole(low: int, high: int) -> Callable[[str], int]:
    """A whole number within bounds."""

    def parse(text: str) -> int:
        number = int(text)
        if not low <= number <= high:
            raise ValueError(f"must be from {low} to {high}")
        return number

    return parse


def seconds(low: float, high: float) -> Callable[[str], float]:
    """A duration within bounds."""

    def parse(text: str) -> float:
        number = float(text)
        if not low <= number <= high:  # also refuses NaN
            raise ValueError(f"must be from {low:g} to {high:g} seconds")
        return number

    return parse


def size_bytes(text: str) -> int:
    """`512MiB`, `2GiB`, `1000000`: bytes."""
    stripped = text.strip()
    digits = stripped.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = stripped[len(digits) :].strip().lower()
    if unit not in _UNITS:
        raise ValueError(f"unknown unit {unit!r}; use KiB, MiB or GiB")
    number = int(float(digits) * _UNITS[unit])
    if number <= 0:
        raise ValueError("must be more than nothing")
    return number


def boolean(text: str) -> bool:
    """`true` or `false` in the usual spellings."""
    lowered = text.strip().lower()
    if lowered in {"1", "true", "yes", "on"}:
        return True
    if lowered in {"0", "false", "no", "off"}:
        return False
    raise ValueError("must be true or false")
