"""Help of commands with many settings: grouped by topic, short unless `--help-all` is given; near names of mistakes."""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import click

from kvferry.cli.other_flags import VLLM_FLAGS
from kvferry.cli.setting_options import SettingOption
from kvferry.core.settings.setting import Setting
from kvferry.core.settings.topics import COMMON, TOPICS, topic_of

_FEW = 14
"""Number of settings up to which short help shows all of them."""
_NEAR = 0.75
"""Similarity from which a name may be meant."""
_FLAG_WIDTH = 34
"""Width of the column of flags; wider flags have their help on the next line."""
_ALL = "kvferry.help-all"


def near_names(given: str, known: Iterable[str]) -> list[str]:
    """Return the known name that may be meant by a wrong one, in a list; empty if none is similar."""
    return difflib.get_close_matches(given, list(known), 1, _NEAR)


_FLAG = re.compile(r"--[a-z][a-z-]*")


class SettingsCommand(click.Command):
    """A command whose options are grouped by topic in its help."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._hidden_settings():
            option = click.Option(
                ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all,
                help="Show this message with all settings, and exit.",
            )  # fmt: skip
            self.params.append(option)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            click.NoSuchOption: an option is unknown; it suggests one that is similar.
        """
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = [name for parameter in self.params for name in parameter.opts]
            remedy = VLLM_FLAGS.get(error.option_name, "")
            if remedy and set(_FLAG.findall(remedy)) <= set(known):
                message = f"No such option '{error.option_name}' of vLLM's: {remedy}."
                raise click.NoSuchOption(error.option_name, message, ctx=ctx) from None
            raise click.NoSuchOption(
                error.option_name, possibilities=near_names(error.option_name, known), ctx=ctx
            ) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of the command itself, then those of its settings by topic."""
        hidden = () if ctx.meta.get(_ALL, False) else self._hidden_settings()
        own = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        _section(formatter, "Options", _records(ctx, [one for one in own if not isinstance(one, SettingOption)]))
        for topic in TOPICS:
            found = [one for one in self._settings() if topic_of(one.setting.name) == topic]
            if hidden:
                rows = [one.short_record() for one in found if one.setting.name in COMMON]
            else:
                rows = _records(ctx, found)
            _section(formatter, topic, rows)
        formatter.write_paragraph()
        if hidden:
            formatter.write_text(f"{len(hidden)} more settings, and more about these: --help-all")
        if settings := self._settings():
            one = settings[0].setting
            formatter.write_text(
                f"Each setting is also a variable of the environment, such as {one.variable} for {one.flag}, and a key "
                f"of the file of --config, such as {one.name}."
            )

    def _settings(self) -> Sequence[SettingOption]:
        return [one for one in self.params if isinstance(one, SettingOption)]

    def _hidden_settings(self) -> Sequence[Setting]:
        """Return the settings that short help leaves out."""
        settings = [one.setting for one in self._settings()]
        return [one for one in settings if one.name not in COMMON] if len(settings) > _FEW else []


def _records(ctx: click.Context, options: Iterable[click.Option]) -> list[tuple[str, str]]:
    return [row for one in options if (row := one.get_help_record(ctx)) is not None]


def _section(formatter: click.HelpFormatter, title: str, rows: Sequence[tuple[str, str]]) -> None:
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows, col_max=_FLAG_WIDTH)


def _show_all(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()
