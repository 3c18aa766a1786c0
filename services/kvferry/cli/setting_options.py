"""Options of click that are made of settings: types that complete values, metavars with units, defaults with units."""

from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from kvferry.core.settings.parsers import FILE, FOLDER, MODEL_NAME, Parser, boolean, device_name
from kvferry.core.settings.setting import Setting

_MAX_CHOICES_WIDTH = 24
"""Width up to which the metavar of an option lists its choices; longer lists follow the help text."""


class SettingValue(click.ParamType[str]):
    """Text of a value, which is parsed when all sources of the setting are known; completes some values."""

    def __init__(self, name: str, completions: tuple[str, ...] = ()) -> None:
        """
        Args:
            name: name of the kind of values.
            completions: values that a shell completes.
        """
        self.name = name
        self.completions = completions

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the known values that begin with `incomplete`."""
        return [CompletionItem(one) for one in self.completions if one.startswith(incomplete)]


class ModelName(SettingValue):
    """A model: completes known names and paths."""

    def __init__(self) -> None:
        super().__init__("model")

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the known names that begin with `incomplete`, and the request for paths."""
        from kvferry.model.catalog import CATALOG  # needed by completion only

        # Bash's script drops the values that precede the request for paths, and completes paths if no value follows.
        found = [CompletionItem(one) for one in sorted(CATALOG) if one.startswith(incomplete)]
        return [CompletionItem(incomplete, type="file"), *found]


_TYPES: Mapping[Parser[Any], click.ParamType[Any]] = {
    FILE: click.Path(),
    FOLDER: click.Path(file_okay=False),
    MODEL_NAME: ModelName(),
    boolean: SettingValue("boolean", ("true", "false")),
    device_name: SettingValue("device", ("auto", "cpu", "cuda")),
}


def value_type(setting: Setting) -> click.ParamType[Any]:
    """Return the type of a setting's option."""
    if setting.choices:
        return click.Choice(setting.choices)
    return _TYPES.get(setting.parse) or SettingValue(setting.parse.metavar)


class SettingOption(click.Option):
    """The flag of a setting. Its value stays text until the sources are resolved."""

    def __init__(self, declarations: Sequence[str], *, setting: Setting) -> None:
        """
        Args:
            declarations: the setting's flag and name.
            setting: the setting, not a secret.
        """
        # A flag that is true or false needs no value: `--log-json` is `--log-json true`.
        optional: dict[str, Any] = {"is_flag": False, "flag_value": "true"} if setting.parse is boolean else {}
        super().__init__(
            declarations,
            default=None,
            multiple=setting.is_repeated,
            type=value_type(setting),
            metavar=_metavar(setting),
            help=f"{setting.help}{_choices(setting)}{_default(setting)}",
            **optional,
        )
        self.setting = setting

    def short_record(self) -> tuple[str, str]:
        """Return the flag, and the first sentence of its help with choices and default."""
        sentence = self.setting.help.partition(". ")[0].removesuffix(".")
        return f"{self.setting.flag} {self.metavar}", f"{sentence}.{_choices(self.setting)}{_default(self.setting)}"


def _lists_choices(setting: Setting) -> bool:
    return len("|".join(setting.choices)) <= _MAX_CHOICES_WIDTH


def _metavar(setting: Setting) -> str:
    if setting.choices:
        return "|".join(setting.choices) if _lists_choices(setting) else "NAME"
    return "[true|false]" if setting.parse is boolean else setting.parse.metavar


def _choices(setting: Setting) -> str:
    return "" if _lists_choices(setting) else f" One of {', '.join(setting.choices)}."


def _default(setting: Setting) -> str:
    is_empty = setting.default in (None, "", ()) or setting.default is False
    return "" if is_empty else f" [default: {setting.shown(setting.default)}]"
