"""A stand-in hub with a tiny model, and a cache that no other test uses."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.servers.hub import HubRepo, StandInHub, stand_in_hub
from unit.weights.test_safetensors import make_folder

from kvferry.model.hub.download import HubAccess

REPO = "org/tiny-model"


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a tiny safetensors model, with some that are not needed."""
    found = files_of(make_folder(tmp_path_factory.mktemp("repo") / "tiny"))
    return {**found, "README.md": b"# tiny", "modeling.py": b"raise SystemExit", "pytorch_model.bin": b"pickle"}


@pytest.fixture
def hub(tiny_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandInHub]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)  # before it resumes
    with stand_in_hub() as made:
        made.repos[REPO] = HubRepo(dict(tiny_files))
        yield made


@pytest.fixture
def access(hub: StandInHub, tmp_path: Path) -> HubAccess:
    return HubAccess(hub.url, tmp_path / "hf")
