"""`kvferry pull` fetches a model by name, and reports errors as one line without secrets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.servers.hub import HubRepo, StandInHub, stand_in_hub
from unit.model.hub.conftest import REPO, files_of
from unit.weights.test_safetensors import make_folder

from kvferry.core.process.config import child_environment

TOKEN = "hf_not_for_eyes"


@pytest.fixture
def hub(tmp_path: Path):
    with stand_in_hub() as made:
        made.repos[REPO] = HubRepo(files_of(make_folder(tmp_path / "made")))
        yield made


def run(hub: StandInHub, tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvferry.cli.main", *arguments],
        env=child_environment(
            {
                **hub.environment(),
                "HF_TOKEN": TOKEN,
                "HF_HOME": str(tmp_path / "home"),
                "XDG_CACHE_HOME": str(tmp_path / "xdg"),
                **variables,
            }
        ),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_model_is_fetched_into_the_shared_cache(hub: StandInHub, tmp_path: Path) -> None:
    done = run(hub, tmp_path, "pull", REPO)
    assert (done.returncode, done.stderr) == (0, "")
    commit, _ = hub.repos[REPO].at("main") or ("", None)
    assert done.stdout.startswith(f"{REPO} is in the cache, sha256 ")
    path = tmp_path / "home/hub/models--org--tiny-model/snapshots" / commit
    assert done.stdout.endswith(f", commit {commit}, at {path}\n")
    assert (tmp_path / "home/hub/models--org--tiny-model/refs/main").read_text() == commit
    assert f"Bearer {TOKEN}" in {one.authorization for one in hub.requests}
    hub.requests.clear()
    again = run(hub, tmp_path, "model", "fetch", f"{REPO}@main", HF_HUB_OFFLINE="1")
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert hub.requests == []
    elsewhere = run(hub, tmp_path, "pull", REPO, HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path / "other"))
    assert elsewhere.returncode == 2
    assert f"not in the cache {tmp_path / 'other'}" in elsewhere.stderr
    assert hub.requests == []


@pytest.mark.parametrize(
    ("name", "status", "told"),
    [
        ("org/tiny-modell", 2, f"did you mean {REPO}?"),
        (f"{REPO}@v9", 2, "has no revision 'v9'"),
        (f"{REPO}:Q4_K_M", 2, "the repository has no GGUF files"),
        (f"{REPO}:Q4 K", 2, "is not a quantization"),
        ("./models/x", 2, "or a folder"),
    ],
)
def test_an_error_is_one_line(hub: StandInHub, tmp_path: Path, name: str, status: int, told: str) -> None:
    done = run(hub, tmp_path, "pull", name)
    assert (done.returncode, done.stdout) == (status, "")
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert TOKEN not in done.stderr


def test_a_hub_that_cannot_be_reached_is_one_line(hub: StandInHub, tmp_path: Path) -> None:
    done = run(hub, tmp_path, "pull", REPO, HF_ENDPOINT="http://name:secret@127.0.0.1:9")
    assert done.returncode == 1
    assert "http://127.0.0.1:9 cannot be reached" in done.stderr
    assert "secret" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_model_is_named_once(hub: StandInHub, tmp_path: Path) -> None:
    done = run(hub, tmp_path, "up", REPO, "--model", "tiny")
    assert done.returncode == 2
    assert "model is given twice: 'org/tiny-model' and --model 'tiny'; give one of them" in done.stderr
    shown = run(hub, tmp_path, "up", REPO, "--model", REPO, "--print-config")
    assert shown.returncode == 0
    assert f'model = "{REPO}"' in shown.stdout
    assert hub.requests == []
    assert os.listdir(tmp_path) == ["made"]


def test_a_local_model_does_not_load_the_library_of_the_hub() -> None:
    code = (
        "import sys; from kvferry.model.source import open_model; open_model('tiny');"
        "print('huggingface_hub' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
