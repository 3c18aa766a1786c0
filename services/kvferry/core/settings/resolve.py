"""Resolves settings from four sources and records the source of each value.

Precedence: flag, environment (`KVFERRY_<NAME>`), TOML file, default. An invalid value is an error that contains the
setting, the source and the remedy; the default is never used instead.
"""

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.core.errors import UsageError, shortened
from kvferry.core.settings.setting import ENVIRONMENT_PREFIX, Setting

DEFAULT_SOURCE = "default"
"""Source of values that are not set."""
_NEAR = 0.8
"""Similarity from which a variable is taken for a misspelled setting."""
_NEAREST = 0.92
"""Similarity from which a setting of another command may be meant for this one."""


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
            similar = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {similar[0]}?" if similar else f"known settings are {', '.join(sorted(known))}"
            raise UsageError(f"{file_name}: unknown setting {name!r}; {hint}", field=name)
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
            found[setting.name] = Resolved(setting, setting.default, DEFAULT_SOURCE)
            continue
        found[setting.name] = Resolved(setting, _read(setting, value, source), source)
    return found


def check_variables(
    environment: Mapping[str, str], settings: Sequence[Setting], others: Collection[str]
) -> dict[str, str]:
    """Check that no environment variable is a misspelled setting; return the variables that are settings of other
    commands and nearly one of this command, with the latter.

    Other variables with kvferry's prefix are ignored: a Service in Kubernetes named `kvferry` makes some of them.

    Args:
        environment: environment variables by name.
        settings: the settings of the command.
        others: names of the settings of all commands.

    Raises:
        UsageError: a variable is nearly the one of a setting, and no setting itself.
    """
    known = {setting.variable: _letters(setting.variable) for setting in settings}
    doubtful: dict[str, str] = {}
    for variable in sorted(environment):
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name == variable or variable in known:
            continue
        is_other = name.lower() in others
        near = difflib.get_close_matches(_letters(variable), known.values(), 1, _NEAREST if is_other else _NEAR)
        if not near:
            continue
        meant = next(one for one, text in known.items() if text == near[0])
        if not is_other:
            raise UsageError(f"{variable} is not a setting; did you mean {meant}? Correct or unset it", field=variable)
        if meant not in environment:
            doubtful[variable] = meant
    return doubtful


def _letters(variable: str) -> str:
    return variable.removeprefix(ENVIRONMENT_PREFIX).replace("_", "")


def _read(setting: Setting, value: object, source: str) -> object:
    if setting.is_repeated:
        items = value if isinstance(value, list | tuple) else [v for v in str(value).split(",") if v]
        return [_read_one(setting, item, source) for item in items]
    return _read_one(setting, value, source)


def _read_one(setting: Setting, value: object, source: str) -> object:
    if isinstance(value, list | dict):
        raise UsageError(f"{source}: {setting.name} must be one value, not a list or a table", field=setting.name)
    try:
        parsed = setting.parse(value if isinstance(value, str) else str(value))
    except ValueError as error:
        if setting.is_secret:  # do not show the value or an error message that may quote it
            raise UsageError(f"{source}: the value is invalid; {setting.help}", field=setting.name) from None
        place = source if source in (setting.flag, setting.variable) else f"{source}: {setting.name}"
        raise UsageError(f"{place}: {shortened(repr(value))} is invalid: {error}", field=setting.name) from error
    if setting.choices and parsed not in setting.choices:
        raise UsageError(f"{source}: {value!r} is not one of {', '.join(setting.choices)}", field=setting.name)
    return parsed
