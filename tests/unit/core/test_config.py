"""Where files are kept."""

from pathlib import Path

import pytest

from kvferry.core.config import cache_dir


def test_cache_follows_the_xdg_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "kvferry"


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_an_unusable_xdg_variable_means_the_home_folder(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache_dir() == Path.home() / ".cache" / "kvferry"
