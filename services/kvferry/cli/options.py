"""Settings as command-line flags, and what every command does with them: resolve, show, report errors."""

import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from kvferry.core import config, logs
from kvferry.core.errors import KvferryError, UsageError
from kvferry.core.settings import Resolved, Setting, boolean, resolve

LOGGING = (
    Setting("log_level", "warning", "How much to log.", choices=("debug", "info", "warning", "error")),
    Setting("log_json", False, "Log lines of JSON instead of text.", parse=boolean),
)

_PASSWORD = re.compile(r"://[^/@\s]*@")
"""Of a URL."""
EXIT_FAILED = 1
EXIT_USAGE = 2


class Values:
    """A command's resolved settings: `values["connector"]`."""

    def __init__(self, resolved: dict[str, Resolved]) -> None:
        self.resolved = resolved

    def __getitem__(self, name: str) -> Any:
        return self.resolved[name].value

    def is_given(self, name: str) -> bool:
        """Whether it was set anywhere, rather than left at its default."""
        return self.resolved[name].source != "default"

    def show(self) -> None:
        """Print every value with where it came from."""
        for name, found in self.resolved.items():
            value = "(hidden)" if found.setting.is_secret and found.value else found.value
            value = _PASSWORD.sub("://(hidden)@", str(value))
            click.echo(f"{name:<24} {value!s:<32} {found.source}")


def with_settings(settings: Sequence[Setting]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag for each setting; the function gets them as its first argument, a `Values`."""
    everything = (*settings, *LOGGING)

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(*, config_file: Path | None, print_config: bool, **flags: Any) -> None:
            own = {s.name: flags.pop(s.name, None) for s in everything if not s.is_secret}
            with reported():
                file = config.read_settings_file(config_file)
                values = Values(resolve(everything, own, config.environment(), file, str(config_file or "")))
                if print_config:
                    values.show()
                    return
                logs.setup(values["log_level"], as_json=values["log_json"])
                function(values, **flags)

        command: Callable[..., None] = run
        for setting in reversed([s for s in everything if not s.is_secret]):
            command = _option(setting)(command)
        command = click.option(
            "--print-config", is_flag=True, help="Show every setting and where it came from; do nothing."
        )(command)
        return click.option(
            "--config",
            "config_file",
            type=click.Path(path_type=Path, dir_okay=False),
            help="A TOML file of settings, named as the flags with underscores.",
        )(command)

    return decorate


class reported:  # noqa: N801  a context manager read as a word
    """Turns our own errors into one line on standard error and an exit code; nobody is shown a stack trace."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, KvferryError):
            fail(error)
        if isinstance(error, KeyboardInterrupt):
            raise SystemExit(130) from None


def fail(error: KvferryError) -> NoReturn:
    """Say what is wrong and exit: 2 for wrong usage, 1 for work that failed."""
    usage = isinstance(error, UsageError) or error.http_status in {400, 404}
    click.echo(f"kvferry: {error.message}", err=True)
    raise SystemExit(EXIT_USAGE if usage else EXIT_FAILED)


def print_json(value: object) -> None:
    """One JSON object as the last line of standard output."""
    click.echo(json.dumps(value, ensure_ascii=False))


def _option(setting: Setting) -> Callable[[Callable[..., None]], Callable[..., None]]:
    default = "" if setting.default in (None, "", ()) else f"; default {setting.default}"
    choices = f" One of {', '.join(setting.choices)}." if setting.choices else ""
    return click.option(
        setting.flag,
        setting.name,
        default=None,
        multiple=setting.is_repeated,
        metavar="VALUE",
        help=f"{setting.help}{choices} [{setting.variable}{default}]",
    )
