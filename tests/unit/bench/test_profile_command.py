"""`kvferry profile`: a recording of a model as files, and its replays."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvferry.cli.commands.profile_steps import command

ENGINE = ["--model", "tiny", "--dtype", "float32", "--threads", "1", "--kv-memory", "4MiB"]


def run(*arguments: str, status: int = 0) -> Result:
    result = CliRunner().invoke(command, [*arguments])
    assert result.exit_code == status, result.output
    return result


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    files = ["--log", str(folder / "log"), "--trace", str(folder / "trace"), "--json", str(folder / "json")]
    shape = ["--batch", "3", "--input-tokens", "20", "--output-tokens", "8", "--tokens"]
    run("model", "--steps", "50", *shape, *files, *ENGINE)
    return folder


def test_a_recording_is_a_picture_a_log_and_a_summary(recorded: Path) -> None:
    found = json.loads((recorded / "json").read_text())
    assert found["replayable"]
    assert found["steps"] == 10
    phases = {(row["lane"], row["name"]): row for row in found["phases"]}
    assert phases["engine", "compute"]["count"] == 10
    assert phases["engine", "gap"]["count"] == 9
    assert phases["runner", "forward"]["mean_ms"] > 0
    events = json.loads((recorded / "trace").read_text())["traceEvents"]
    assert sum(event["name"].startswith("step ") for event in events) == 10


def test_the_log_is_replayed_by_simulator_and_engine(recorded: Path, tmp_path: Path) -> None:
    text = run("replay", str(recorded / "log"), "--json", str(tmp_path / "json")).output
    assert "10 steps have the same schedule" in text
    assert "step_ms = " in text
    assert json.loads((tmp_path / "json").read_text())["equal"]
    text = run("replay", str(recorded / "log"), "--against", "engine", *ENGINE).output
    assert "10 steps have the same schedule, and 24 tokens are the same" in text


def test_a_file_that_is_no_log_is_refused(recorded: Path, tmp_path: Path) -> None:
    lines = (recorded / "log").read_text().splitlines(keepends=True)
    changed = tmp_path / "log"
    changed.write_text("".join([lines[0], lines[1].replace("[[0,0,20,1]]", "[[0,0,19,0]]"), *lines[2:]]))
    assert (
        "step 0 differs: logged [(0, 0, 19, 0)], planned [(0, 0, 20, 1)]"
        in run("replay", str(changed), status=1).output
    )
    changed.write_text("{}")
    assert "line 1 of the step log is invalid" in run("replay", str(changed), status=2).output


def test_a_log_that_does_not_fit_is_refused(recorded: Path, tmp_path: Path) -> None:
    text = (recorded / "log").read_text()
    changed = tmp_path / "log"

    def refused(content: str | bytes, *options: str) -> str:
        changed.write_bytes(content if isinstance(content, bytes) else content.encode())
        return run("replay", str(changed), *options, status=2).output

    assert "line 1 of the step log is invalid: 'utf-8' codec" in refused(b"\xff" * 100)
    assert "is invalid: reserve_share must be from 0 to 1" in refused(
        text.replace('"reserve_share":0.01', '"reserve_share":NaN')
    )
    assert "token_budget must be a whole number from 1" in refused(
        text.replace('"token_budget":2048', '"token_budget":0')
    )
    many = text.replace('"num_blocks":512', f'"num_blocks":{1 << 24}')
    assert many != text
    assert "with tiny, more than the" in refused(many, "--against", "engine", *ENGINE)
    lines = text.splitlines(keepends=True)
    foreign = "".join(
        line.replace('"tokens":[', '"tokens":[99999,', 1) if '"request":' in line else line for line in lines
    )
    foreign = foreign.replace('"num_prompt":20', '"num_prompt":21')
    assert "is inconsistent at step 0" in refused(foreign, "--against", "engine", *ENGINE)
    assert "is not a regular file" in run("replay", "/dev/zero", status=2).output
