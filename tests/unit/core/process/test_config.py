"""Configuration of a process: paths of its files, environment of its children, refused files."""

import os
from pathlib import Path

import pytest

from kvferry.core.errors import UsageError
from kvferry.core.process.config import cache_dir, child_environment, environment, read_secret_file, read_settings_file


def test_cache_follows_the_xdg_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "kvferry"


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_an_unusable_xdg_variable_means_the_home_folder(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache_dir() == Path.home() / ".cache" / "kvferry"


def test_a_child_inherits_all_but_our_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_PREFILL", "3")
    monkeypatch.setenv("OTHER", "kept")
    assert environment()["KVFERRY_PREFILL"] == "3"
    child = child_environment({"KVFERRY_TICKET_KEY": "x"})
    assert "KVFERRY_PREFILL" not in child
    assert (child["OTHER"], child["KVFERRY_TICKET_KEY"]) == ("kept", "x")


def test_no_settings_file_is_no_settings(tmp_path: Path) -> None:
    assert read_settings_file(None) == {}
    path = tmp_path / "kvferry.toml"
    path.write_text('connector = "shm"\nthreads = 2\n')
    assert read_settings_file(path) == {"connector": "shm", "threads": 2}


@pytest.mark.parametrize("content", [b"threads = ", b"\xff\xfe", b"#" * ((1 << 20) + 1)], ids=["toml", "utf8", "huge"])
def test_a_settings_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "kvferry.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"kvferry\.toml") as caught:
        read_settings_file(path)
    assert caught.value.field == "config"


def test_a_device_is_no_settings_file() -> None:
    with pytest.raises(UsageError, match="/dev/zero is not a regular file"):
        read_settings_file(Path("/dev/zero"))


def test_a_missing_settings_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml"):
        read_settings_file(tmp_path / "none.toml")


def test_a_secret_comes_without_the_newline_that_editors_add(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"0123456789abcdef\n")
    assert read_secret_file(path, "ticket_key_file") == b"0123456789abcdef"


def test_an_empty_or_missing_secret_names_the_file_and_the_setting(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b" \n")
    for name, says in [("empty", "is empty"), ("missing", "No such file")]:
        with pytest.raises(UsageError, match=says) as caught:
            read_secret_file(tmp_path / name, "ticket_key_file")
        assert (caught.value.field, name in caught.value.message) == ("ticket_key_file", True)


def test_a_secret_is_read_from_a_small_regular_file_only(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * (1 << 21))
    for path, says in ((tmp_path / "pipe", "regular file"), (Path("/dev/zero"), "regular file"), (tmp_path, "regular")):
        with pytest.raises(UsageError, match=says):
            read_secret_file(path, "ticket_key_file")
    with pytest.raises(UsageError, match="larger"):
        read_secret_file(tmp_path / "large", "ticket_key_file")
