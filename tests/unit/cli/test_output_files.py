"""Output files are checked before a command runs."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvferry.cli.main import main
from kvferry.cli.output_files import write_file
from kvferry.core.errors import UsageError

FLEET = Path(__file__).resolve().parents[3] / "docs" / "examples" / "fleet.toml"


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


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 300, "loop"])
def test_a_path_that_cannot_be_a_file_is_refused_before_the_run(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    done = CliRunner().invoke(main, ["simulate", str(FLEET), "--json", path])
    assert done.exit_code == 2
    assert "Invalid value for '--json'" in done.output


@pytest.mark.parametrize(
    "words", [("simulate", "--json"), ("simulate", "--svg"), ("tune", "--write"), ("plan", "--json")]
)
def test_a_file_that_is_read_is_not_overwritten(words: tuple[str, str], tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(FLEET.read_text())
    done = CliRunner().invoke(main, [words[0], str(fleet), words[1], str(tmp_path / "." / "fleet.toml")])
    assert (done.exit_code, "is given twice" in done.output) == (2, True)
    assert fleet.read_text() == FLEET.read_text()


def test_a_full_disk_is_reported_after_the_results() -> None:
    done = CliRunner().invoke(main, ["simulate", str(FLEET), "--json", "/dev/full"])
    assert done.exit_code == 2
    assert "cannot write /dev/full: No space left on device; use another file" in done.output
    assert '"goodput"' in done.output


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, link = tmp_path / "r.json", tmp_path / "link"
    link.symlink_to(file)
    for text in ("old", "new"):
        write_file(link, text)
        assert (file.read_text(), link.is_symlink()) == (text, True)
        file.chmod(0o640)
    assert file.stat().st_mode & 0o777 == 0o640
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(UsageError, match="No space left"):
            write_file(file, "newer")
    assert file.read_text() == "new"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "r.json"]
    write_file(Path(os.devnull), "any")
    assert not Path(os.devnull).is_file()
