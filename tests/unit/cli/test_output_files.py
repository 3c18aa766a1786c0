"""Output files are checked before a command runs."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from kvferry.cli.main import main


@pytest.mark.parametrize(
    "words",
    [
        ("profile", "model", "--log"),
        ("profile", "model", "--json"),
        ("bench", "latency", "--json"),
        ("bench", "serve", "--svg"),
        ("simulate", "fleet.toml", "--svg"),
        ("tune", "fleet.toml", "--write"),
        ("plan", "fleet.toml", "--json"),
    ],
)
def test_a_folder_that_does_not_exist_is_named_before_the_run(words: tuple[str, ...], tmp_path: Path) -> None:
    done = CliRunner().invoke(main, [*words, str(tmp_path / "missing" / "file")])
    assert done.exit_code == 2
    assert f"the folder '{tmp_path}/missing' does not exist" in " ".join(done.output.split())


def test_a_folder_as_output_file_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["bench", "latency", "--json", str(tmp_path)])
    assert done.exit_code == 2
