"""The workers that `kvferry up` starts."""

import socket
from dataclasses import replace

import pytest
from click.testing import CliRunner

from kvferry.cli.commands import up
from kvferry.cli.options import Values
from kvferry.core.settings.processes import UP, UP_ADMIN
from kvferry.core.settings.resolve import resolve
from kvferry.stack.plan.processes import StackConfig


async def started(config: StackConfig, *_: object, **__: object) -> int:
    print(f"http={config.http}")
    return 0


@pytest.mark.parametrize(
    ("flags", "environment", "said"),
    [
        (("--port", "8080"), {}, "http=127.0.0.1:8080"),
        (("--host", "0.0.0.0"), {}, "http=0.0.0.0:8000"),
        (("--host", "::1", "--port", "0"), {}, "http=[::1]:0"),
        (("--port", "8080"), {"KVFERRY_HTTP": "127.0.0.2:1"}, "http=127.0.0.2:8080"),
        (("--port", "8080", "--http", "127.0.0.1:1"), {}, "--http '127.0.0.1:1' has host and port"),
        (("--port", "70000"), {}, "0<=x<=65535"),
    ],
)
def test_host_and_port(flags, environment, said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "_up", started)
    result = CliRunner().invoke(up.command, ["--model", "tiny", "--device", "cpu", *flags], env=environment)
    assert said in result.output
    assert (result.exit_code == 0) == said.startswith("http=")
    assert ("not loopback, without API keys" in result.output) == ("0.0.0.0" in flags)


@pytest.mark.parametrize(
    ("flags", "cores", "workers"),
    [
        ((), 2, (0, 0, 1)),
        ((), 16, (1, 1, 0)),
        (("--prefill", "1"), 2, (1, 1, 0)),
        (("--connector", "tcp"), 2, (1, 1, 0)),
        (("--kv-prefetch-tokens", "0"), 2, (1, 1, 0)),
        (("--both", "1", "--prefill", "0", "--decode", "0"), 16, (0, 0, 1)),
    ],
)
def test_the_workers_of_a_stack(flags, cores, workers, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[StackConfig] = []

    async def start(config: StackConfig, *_: object, **__: object) -> int:
        started.append(config)
        return 0

    monkeypatch.setattr(up, "_up", start)
    monkeypatch.setattr(up, "usable_cores", lambda: cores)
    result = CliRunner().invoke(up.command, ["--model", "tiny", "--device", "cpu", *flags])
    assert result.exit_code == 0, result.output
    (config,) = started
    assert (config.prefill, config.decode, config.both) == workers
    assert ("one worker computes prompts and outputs" in result.output) == (not flags and cores == 2)


def test_the_admin_port_is_a_known_one_and_a_free_one_if_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert UP_ADMIN in UP
    assert UP_ADMIN.default == "127.0.0.1:8002"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        of_default = Values(resolve([replace(UP_ADMIN, default=address)], {}, {}, {}))
        assert up._admin(of_default) == "127.0.0.1:0"
        assert f"port {taken.getsockname()[1]} is taken" in capsys.readouterr().err
        given = Values(resolve([UP_ADMIN], {"admin": address}, {}, {}))
        assert up._admin(given) == address, "an address that was given is refused later, not replaced"
    assert up._admin(of_default) == address
    assert capsys.readouterr().err == ""
