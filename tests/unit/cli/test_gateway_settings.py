"""Settings of the HTTP API reach the gateway, also from `kvferry up`."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from kvferry.cli.commands.gateway import _config, command
from kvferry.cli.commands.up import flags_for
from kvferry.cli.options import Values
from kvferry.core.errors import UsageError
from kvferry.core.process.toml_text import parse_toml
from kvferry.core.settings import processes
from kvferry.core.settings.resolve import resolve
from kvferry.core.settings.setting import Setting

GIVEN = {
    "strict_fields": "true",
    "sse_keepalive": "3",
    "http_keepalive": "60",
    "cors_origins": ["https://a", "https://b"],
    "allowed_hosts": ["llm.example", "10.0.0.7"],
    "no_page": "true",
}


def resolved(settings: tuple[Setting, ...], given: dict[str, object]) -> Values:
    return Values(resolve((*settings, *processes.LOGGING), given, {}, {}))


def test_a_gateway_has_the_settings_of_its_http_api() -> None:
    http = _config(resolved(processes.GATEWAY, GIVEN)).http
    assert (http.strict_fields, http.sse_keepalive_seconds, http.http_keepalive_seconds) == (True, 3.0, 60.0)
    assert http.cors_origins == ("https://a", "https://b")
    assert http.allowed_hosts == ("llm.example", "10.0.0.7")
    assert not http.has_page
    default = _config(resolved(processes.GATEWAY, {})).http
    assert (default.strict_fields, default.sse_keepalive_seconds, default.http_keepalive_seconds) == (
        False,
        15.0,
        120.0,
    )
    assert (default.cors_origins, default.allowed_hosts, default.has_page) == ((), (), True)


@pytest.mark.parametrize("given", ["http://a", "a:80", "", "a b", "*"])
def test_a_host_has_neither_scheme_nor_port(given: str) -> None:
    with pytest.raises(UsageError, match="without scheme and port"):
        resolved(processes.GATEWAY, {"allowed_hosts": [given]})


@pytest.mark.parametrize("command", ["gateway", "up"])
def test_the_admin_port_has_the_file_of_its_tokens(command: str) -> None:
    given: dict[str, object] = {"admin_token_file": "tokens"}
    if command == "up":
        flags = flags_for(processes.GATEWAY, resolved(processes.UP, given))
        assert flags[flags.index("--admin-token-file") + 1] == "tokens"
    assert _config(resolved(processes.GATEWAY, given)).admin_token_file == Path("tokens")
    assert _config(resolved(processes.GATEWAY, {})).admin_token_file is None


def test_a_local_stack_hands_them_to_its_gateway() -> None:
    flags = flags_for(processes.GATEWAY, resolved(processes.UP, GIVEN))
    known = {setting.flag: setting for setting in processes.GATEWAY}
    found: dict[str, object] = {}
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        name = known[flag].name
        found[name] = [*found.get(name, []), value] if known[flag].is_repeated else value  # type: ignore[misc]
    assert _config(resolved(processes.GATEWAY, found)).http == _config(resolved(processes.GATEWAY, GIVEN)).http


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [(["--strict-fields"], True), (["--strict-fields", "false"], False), (["--strict-fields=on"], True)],
)
def test_a_switch_needs_no_value(arguments: list[str], shown: bool) -> None:
    result = CliRunner().invoke(command, [*arguments, "--log-json", "--print-config"])
    assert parse_toml(result.output) == {"strict_fields": shown, "log_json": True}
