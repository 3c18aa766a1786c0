"""The workers that `kvferry up` starts."""

import pytest
from click.testing import CliRunner

from kvferry.cli.commands import up
from kvferry.stack.plan.processes import StackConfig


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
