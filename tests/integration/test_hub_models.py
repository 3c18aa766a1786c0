"""`kvferry up ORG/NAME`: one download by the command itself, from a hub on loopback; its processes need no hub."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from harness.idle import assert_workers_idle
from harness.servers.hub import HubRepo, StandInHub, stand_in_hub
from harness.servers.processes import a_worker, running
from unit.model.hub.conftest import REPO, files_of
from unit.weights.test_safetensors import make_folder

from kvferry.core.process.config import child_environment

FLAGS = ("--dtype", "float32", "--kv-memory", "16MiB", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--json")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[StandInHub]:
    with stand_in_hub() as made:
        made.repos[REPO] = HubRepo(files_of(make_folder(tmp_path / "made")))
        yield made


@pytest.fixture
def env(hub: StandInHub, tmp_path: Path) -> dict[str, str]:
    return {**hub.environment(), "HF_HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "xdg")}


def test_a_stack_serves_a_model_by_its_name(hub: StandInHub, env: dict[str, str]) -> None:
    with running("up", REPO, *FLAGS, env=env) as process:
        ready = process.wait_for("ready")
        assert sorted(hub.fetched()) == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
        information = [one.path for one in hub.requests if one.path.startswith("/api/")]
        assert information == [f"/api/models/{REPO}"], "the workers and the gateway ask the hub for nothing"
        url = f"http://{ready['http']}/v1"
        assert [one["id"] for one in httpx.get(f"{url}/models").json()["data"]] == [REPO]
        body = {"model": REPO, "prompt": "hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        reply = httpx.post(f"{url}/completions", json=body, timeout=60.0)
        assert reply.status_code == 200, reply.text
        assert reply.json()["model"] == REPO
        workers = ready["workers"]
        assert isinstance(workers, dict)
        assert_workers_idle([str(address) for address in workers.values()])
        assert process.stop() == 0


def test_workers_that_start_together_download_once(hub: StandInHub, env: dict[str, str]) -> None:
    """Two processes ask for the same files at the same time; huggingface_hub's lock lets one of them download."""
    done: list[subprocess.CompletedProcess[str]] = []

    def pull() -> None:
        command = [sys.executable, "-m", "kvferry.cli.main", "pull", REPO]
        done.append(
            subprocess.run(
                command, env=child_environment(env), capture_output=True, text=True, timeout=120, check=False
            )
        )

    threads = [threading.Thread(target=pull) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(one.returncode, one.stderr) for one in done] == [(0, ""), (0, "")]
    assert hub.fetched().count("model.safetensors") == 1


def test_a_worker_reports_how_long_the_model_took(hub: StandInHub, env: dict[str, str]) -> None:
    flags = ("--metrics", "127.0.0.1:0", "--log-level", "info")
    with a_worker("both", *flags, model=f"{REPO}@main", env=env) as worker:
        page = httpx.get(f"http://{worker.events['listening']['metrics']}/metrics").text
        values = [line.split()[-1] for line in page.splitlines() if line.startswith("kvferry_model_load_seconds{")]
        assert len(values) == 1
        assert 0 < float(values[0]) < 60
        assert worker.stop() == 0
