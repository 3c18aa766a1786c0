"""Help by topic, completion of values, near names of mistakes, and settings that are printed and read again."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvferry.bench.commit import ROOT
from kvferry.cli.main import main
from kvferry.cli.other_flags import VLLM_FLAGS
from kvferry.cli.setting_options import SettingOption
from kvferry.core.process.toml_text import parse_toml
from kvferry.core.settings.processes import UP
from kvferry.core.settings.topics import topic_of


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from leaves(found, (*path, name))
    else:
        yield path, command


COMMANDS = dict(leaves(main))
WITH_SETTINGS = {
    path: command
    for path, command in COMMANDS.items()
    if any("--print-config" in parameter.opts for parameter in command.params)
}


def run(*arguments: str, env: dict[str, str] | None = None) -> str:
    result = CliRunner().invoke(main, arguments, env=env, prog_name="kvferry", catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def completed(words: str) -> list[str]:
    env = {"_KVFERRY_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    return CliRunner().invoke(main, [], env=env, prog_name="kvferry").output.split()


@pytest.mark.parametrize("path", WITH_SETTINGS, ids=" ".join)
def test_printed_settings_are_read_again(path: tuple[str, ...], tmp_path: Path) -> None:
    arguments = list(path)
    for parameter in WITH_SETTINGS[path].params:
        if isinstance(parameter, click.Argument) and parameter.required:
            arguments.append(str(Path(__file__) if isinstance(parameter.type, click.Path) else "x"))
        elif parameter.required:
            arguments += [parameter.opts[0], "127.0.0.1:1"]
    first = run(*arguments, "--log-level", "info", "--log-json", "--print-config")
    assert parse_toml(first) == {"log_level": "info", "log_json": True}
    file = tmp_path / "kvferry.toml"
    file.write_text(first)
    again = run(*arguments, "--config", str(file), "--print-config")
    assert parse_toml(again) == parse_toml(first)
    assert again.replace(str(file), "F").count("# from F") == 2


@pytest.mark.parametrize("path", WITH_SETTINGS, ids=" ".join)
def test_help_has_each_setting_under_its_topic(path: tuple[str, ...]) -> None:
    has_more = any("--help-all" in parameter.opts for parameter in WITH_SETTINGS[path].params)
    short = run(*path, "--help")
    full = run(*path, "--help-all") if has_more else short
    assert ("more settings" in short) == has_more
    assert "more settings" not in full
    assert "VALUE" not in full
    for one in WITH_SETTINGS[path].params:
        if isinstance(one, SettingOption):
            before = full[: full.index(f"\n  {one.setting.flag} ", full.index("\nOptions:"))].splitlines()
            heading = next(line for line in reversed(before) if line.endswith(":") and not line.startswith(" "))
            assert heading == f"{topic_of(one.setting.name)}:"


def test_short_help_is_short() -> None:
    short, full = run("up", "--help"), run("up", "--help-all")
    assert 2 * len(short.splitlines()) < len(full.splitlines())
    assert "more settings, and more about these: --help-all" in short


def test_defaults_have_units() -> None:
    shown = " ".join(run("up", "--help-all").split())
    assert "1073741824" not in shown
    assert "--adapter-memory BYTES Memory for adapter weights" in shown
    assert "[default: 1GiB]" in shown
    assert "--drain-seconds SECONDS" in shown
    assert "--api-keys-file FILE" in shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("kvferry up --connector ", {"plain,shm", "plain,nixl", "plain,tcp", "plain,memory"}),
        ("kvferry worker --role s", {"plain,split"}),
        ("kvferry up --log-level w", {"plain,warning"}),
        ("kvferry up --log-json t", {"plain,true"}),
        ("kvferry up --device c", {"plain,cpu", "plain,cuda"}),
        ("kvferry up smol", {"file,smol", "plain,smollm2-135m-instruct"}),
        ("kvferry up --model smol", {"file,smol", "plain,smollm2-135m-instruct"}),
        ("kvferry up --api-keys-file ke", {"file,ke"}),
        ("kvferry up --batch-folder ba", {"dir,ba"}),
        ("kvferry comp", {"plain,completion"}),
        ("kvferry key n", {"plain,new"}),
    ],
)
def test_values_are_completed(words: str, expected: set[str]) -> None:
    assert set(completed(words)) == expected


def test_commands_are_completed_without_importing_them() -> None:
    code = "import sys; from kvferry.cli.main import main\ntry: main()\nexcept SystemExit: print(*sys.modules)"
    env = {**os.environ, "_KVFERRY_COMPLETE": "bash_complete", "COMP_WORDS": "kvferry ", "COMP_CWORD": "1"}
    program = [sys.executable, "-c", f"import sys; sys.argv[0] = 'kvferry'\n{code}"]
    found = subprocess.run(program, env=env, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "plain,up" in found
    assert "kvferry.cli.commands.up" not in found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str) -> None:
    assert f"_KVFERRY_COMPLETE={shell}_complete" in run("completion", shell)


def test_bash_completes_a_value_by_the_script(tmp_path: Path) -> None:
    program = tmp_path / "kvferry"
    program.write_text(f"#!{sys.executable}\nfrom kvferry.cli.main import main\nmain(prog_name='kvferry')\n")
    program.chmod(0o755)
    words = "COMP_WORDS=(kvferry up --connector n); COMP_CWORD=3; _kvferry_completion kvferry"
    done = subprocess.run(
        ["bash", "-c", f'{run("completion", "bash")}\n{words}; echo "${{COMPREPLY[@]}}"'],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "nixl"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["upp"], "No such command 'upp'. Did you mean 'up'?"),
        (["serve"], "No such command 'serve'. Did you mean 'up'?"),
        (["up", "--max-num-batched-tokens", "1"], "'--max-num-batched-tokens' of vLLM's: use --token-budget."),
        (["up", "--prefil", "1"], "No such option '--prefil'. Did you mean '--prefill'?"),
        (["up", "--hots", "x"], "No such option '--hots'. Did you mean '--host'?"),
        (["up", "--zzz"], "No such option '--zzz'."),
        (["up", "--connector", "tpc"], "'tpc' is not one of 'memory', 'nixl', 'shm', 'tcp'"),
    ],
)
def test_a_mistake_names_what_is_near(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(main, arguments, prog_name="kvferry")
    assert result.exit_code == 2
    assert says in result.output
    assert "one of:" not in result.output


def test_an_error_of_a_value_is_one_sentence() -> None:
    result = CliRunner().invoke(main, ["up", "--speculation", "foo", "--print-config"], prog_name="kvferry")
    assert result.exit_code == 2
    assert len(result.output) < 250
    result = CliRunner().invoke(main, ["up", "--print-config"], env={"KVFERRY_PREFILL": "x"}, prog_name="kvferry")
    assert "KVFERRY_PREFILL: 'x' is invalid: must be a whole number from 0 to 64" in result.output


def test_flags_of_vllm_lead_to_flags_that_exist() -> None:
    known = {setting.flag for setting in UP}
    assert not known & set(VLLM_FLAGS), "a flag of the same name needs no remedy"
    for flag, remedy in VLLM_FLAGS.items():
        assert set(re.findall(r"--[a-z-]+", remedy)) <= known, flag
    text = (ROOT / "docs/comparison.md").read_text()
    assert {flag for flag in VLLM_FLAGS if f"`{flag}`" not in text} == set(), "the page lists them"
