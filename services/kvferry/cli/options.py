"""Adds settings to commands as flags; resolves and prints settings; reports errors."""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from kvferry.cli.setting_options import SettingOption, value_type
from kvferry.cli.supervised import announce
from kvferry.core.errors import KvferryError, ModelFileError, UsageError, shortened
from kvferry.core.process import config, logs
from kvferry.core.settings.class_weights import checked_weights
from kvferry.core.settings.every_name import EVERY_NAME
from kvferry.core.settings.processes import LOGGING
from kvferry.core.settings.resolve import DEFAULT_SOURCE, Resolved, check_variables, resolve
from kvferry.core.settings.setting import Setting
from kvferry.core.settings.settings_file import settings_file
from kvferry.core.traces.spans import TraceSettings
from kvferry.engine.schedule.speculation.settings import checked_speculation
from kvferry.gateway.decide.config import POLICIES
from kvferry.kv import registry as connectors
from kvferry.text.answers.registry import CALL_PARSERS, REASONING_PARSERS

if TYPE_CHECKING:
    from kvferry.rpc.tls.certificate_files import CertificateFiles

REGISTRIES: Mapping[str, tuple[str, ...]] = {
    "connectors": tuple(connectors.names()),
    "routing policies": POLICIES,
    "call parsers": CALL_PARSERS,
    "reasoning parsers": REASONING_PARSERS,
}
"""Choices that are registered outside of the table of settings, by the name that a setting gives."""
CHECKS: Mapping[str, Callable[[str], object]] = {"speculation": checked_speculation, "class_weights": checked_weights}
"""Full checks of text settings, by setting."""
_BARE = "bare_value"
"""Name of the parameter for a setting that is given without its flag."""
EXIT_FAILED = 1
EXIT_USAGE = 2


class Values:
    """A command's resolved settings by name, for example `values["connector"]`."""

    def __init__(self, resolved: dict[str, Resolved]) -> None:
        self.resolved = resolved

    def __getitem__(self, name: str) -> Any:
        return self.resolved[name].value

    def is_given(self, name: str) -> bool:
        """Return whether setting `name` was set by flag, environment or file."""
        return self.resolved[name].source != DEFAULT_SOURCE

    def show(self) -> None:
        """Print every setting with its source, as a file for `--config`."""
        click.echo(settings_file(self.resolved.values()), nl=False)


def bound(setting: Setting) -> Setting:
    """Return a setting with the names that other packages register as its choices, and with its full check."""
    if setting.registry:
        setting = replace(setting, choices=REGISTRIES[setting.registry])
    check = CHECKS.get(setting.name)
    return replace(setting, parse=replace(setting.parse, parse=check)) if check else setting


def with_settings(
    settings: Sequence[Setting], *, argument: str = "", listens: str = ""
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command: add a flag per setting and pass the resolved settings as the first argument, a `Values`.

    Args:
        settings: the settings of the command.
        argument: name of a setting that may also be given without its flag; empty for none.
        listens: name of a setting `HOST:PORT` that may also be given by `--host` and `--port`; empty for none.
    """
    everything = tuple(map(bound, (*settings, *LOGGING)))

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(*, config_file: Path | None, print_config: bool, **flags: Any) -> None:
            own = {s.name: flags.pop(s.name, None) for s in everything if not s.is_secret}
            bare, host, port = flags.pop(_BARE, None), flags.pop("host", None), flags.pop("port", None)
            with reported():
                if bare is not None:
                    own[argument] = _one_of(argument, bare, own[argument])
                doubtful = check_variables(config.environment(), everything, EVERY_NAME)
                for variable, meant in doubtful.items():
                    click.echo(f"warning: {variable} is a setting of other commands; did you mean {meant}?", err=True)
                file = config.read_settings_file(config_file)
                if host is not None or port is not None:
                    found = resolve(everything, {}, config.environment(), file, str(config_file or ""))
                    own[listens] = _address(listens, own[listens], str(found[listens].value), host, port)
                values = Values(resolve(everything, own, config.environment(), file, str(config_file or "")))
                if print_config:
                    values.show()
                    return
                name = config.environment().get(logs.LOG_NAME_VARIABLE, "")
                logs.setup(values["log_level"], as_json=values["log_json"], process=name)
                function(values, **flags)

        command: Callable[..., None] = run
        for setting in reversed([s for s in everything if not s.is_secret]):
            command = click.option(setting.flag, setting.name, cls=SettingOption, setting=setting)(command)
        if argument:
            kind = value_type(next(one for one in everything if one.name == argument))
            command = click.argument(_BARE, metavar=f"[{argument.upper()}]", required=False, type=kind)(command)
        if listens:
            flag = "--" + listens.replace("_", "-")
            port_range = click.IntRange(0, 0xFFFF)
            command = click.option(
                "--port", type=port_range, metavar="PORT", help=f"Port of {flag}; 0 selects a free one."
            )(command)
            command = click.option("--host", metavar="HOST", help=f"Host of {flag}; 0.0.0.0 for all addresses.")(
                command
            )
        command = click.option(
            "--print-config",
            is_flag=True,
            help="Print all settings as a file for --config, then exit.",
        )(command)
        return click.option(
            "--config",
            "config_file",
            type=click.Path(path_type=Path, dir_okay=False),
            help="TOML file with settings, named like the flags but with underscores.",
        )(command)

    return decorate


def _one_of(name: str, bare: str, flag: str | None) -> str:
    """Return the value of a setting that is given without its flag.

    Raises:
        UsageError: the flag has another value.
    """
    if flag is not None and flag != bare:
        raise UsageError(
            f"{name} is given twice: {shortened(bare)!r} and --{name} {shortened(flag)!r}; give one of them", field=name
        )
    return bare


def _address(name: str, given: str | None, default: str, host: str | None, port: int | None) -> str:
    """Return a setting `HOST:PORT` with another host or port.

    Raises:
        UsageError: the setting is given too.
    """
    if given is not None:
        flag = "--" + name.replace("_", "-")
        raise UsageError(f"{flag} {shortened(given)!r} has host and port; leave out --host and --port", field=name)
    default_host, _, default_port = default.rpartition(":")
    if host is not None and ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"{default_host if host is None else host}:{default_port if port is None else port}"


def read_key(values: Values, name: str) -> list[bytes]:
    """Read keys, newest first, from the environment setting `<name>` or the file `<name>_file`: one per line;
    surrounding spaces are ignored.

    Args:
        values: settings of the command.
        name: name of the setting, without `_file`.

    Raises:
        UsageError: a key has fewer than 16 bytes.
    """
    if values[f"{name}_file"]:
        text = config.read_secret_file(Path(values[f"{name}_file"]), f"{name}_file")
    else:
        text = values[name].encode("utf-8", "surrogateescape")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        if len(line) < 16:
            raise UsageError(f"{name}: a key needs at least 16 bytes; this key has {len(line)}", field=name)
    return lines


def server_certificate(values: Values) -> tuple[Path, Path] | None:
    """Return the files of a server's certificate chain and key; `None` if neither is set.

    Raises:
        UsageError: only one of the two is set.
    """
    chain, key = values["tls_cert_file"], values["tls_key_file"]
    if bool(chain) != bool(key):
        missing = "tls_key_file" if chain else "tls_cert_file"
        raise UsageError(f"TLS needs a certificate and its key; {missing} is not set", field=missing)
    return (Path(chain), Path(key)) if chain else None


def pool_tls_files(values: Values) -> "CertificateFiles | None":
    """Return the files for the pool's TLS; `None` if none are set.

    Raises:
        UsageError: only some of the three files are set.
    """
    from kvferry.rpc.tls.certificate_files import CertificateFiles

    names = ("pool_tls_cert_file", "pool_tls_key_file", "pool_tls_ca_file")
    missing = [name for name in names if not values[name]]
    if len(missing) == len(names):
        return None
    if missing:
        flags = " and ".join("--" + name.replace("_", "-") for name in missing)
        raise UsageError(f"a pool's TLS needs a certificate, its key and the CA; set {flags} too", field=missing[0])
    return CertificateFiles(*(Path(values[name]) for name in names))


def traces_of(values: Values) -> TraceSettings | None:
    """Return the destination of traces; `None` for no traces.

    Raises:
        UsageError: the URL is invalid.
    """
    return TraceSettings(values["otlp"], values["trace_sample"]) if values["otlp"] else None


class reported:  # noqa: N801  lower case, since it is used like a keyword: `with reported():`
    """Context manager that converts a `KvferryError` to a line on standard error and an exit status."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, KvferryError):
            fail(error)
        if isinstance(error, KeyboardInterrupt):
            raise SystemExit(130) from None


def fail(error: KvferryError) -> NoReturn:
    """Print the error and exit: status 2 for wrong usage and unusable files of a model, which fail again at the next
    start, and 1 for all other errors."""
    usage = isinstance(error, UsageError | ModelFileError) or error.http_status in {400, 404}
    if config.environment().get(logs.LOG_NAME_VARIABLE):  # its supervisor prints the error, once for all processes
        announce({"event": "failed", "message": error.message})
    else:
        click.echo(f"kvferry: {error.message}", err=True)
    raise SystemExit(EXIT_USAGE if usage else EXIT_FAILED)


class NumberRange(click.FloatRange):
    """A range of numbers that excludes NaN, with which every comparison is false."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number.

        Raises:
            click.BadParameter: it is not a number, or out of range.
        """
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


def print_json(value: object) -> None:
    """Print one JSON object as the last line of standard output."""
    click.echo(json.dumps(value, ensure_ascii=False))


def api_key(values: Values) -> str:
    """Return the API key of the table `CLIENT` from its file or the environment; empty for none.

    Raises:
        UsageError: the file cannot be read.
    """
    if values["api_key_file"]:
        return config.read_secret_file(Path(values["api_key_file"]), "api_key_file").decode("utf-8", "replace")
    return str(values["api_key"])
