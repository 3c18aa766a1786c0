"""The wheels of `make release` serve in a clean environment: no compiler, no pip and no uv on the path."""

import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
RELEASE = ROOT / "build/release"
INSTALL_SECONDS, READY_SECONDS = 900, 240


def _interpreter(version: str) -> str:
    managed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    found = str(managed[-1]) if managed else shutil.which(f"python{version}")
    if found is None:
        pytest.skip(f"Python {version} is not installed")
    return found


@pytest.mark.long
@pytest.mark.timeout(INSTALL_SECONDS + 2 * READY_SECONDS)
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_a_wheel_serves_where_nothing_can_be_built(version: str, tmp_path: Path) -> None:
    tag = "cp311-cp311" if version == "3.11" else "cp312-abi3"
    wheels = sorted(RELEASE.glob(f"kvferry-*-{tag}-manylinux*.whl"))
    if not wheels:
        pytest.skip("no wheel in build/release: make release")
    uv, home = Path(sys.executable).with_name("uv"), tmp_path / "home"
    home.mkdir()

    def install(*arguments: str | Path) -> None:
        command = [uv, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
        assert done.returncode == 0, done.stderr[-3000:]

    venv = tmp_path / "venv"
    install("venv", "--quiet", "--python", _interpreter(version), venv)
    packages = ("pip", "install", "--quiet", "--no-deps", "--python", venv / "bin/python")
    install(*packages, "--require-hashes", "-r", ROOT / "requirements-run.lock")
    install(*packages, wheels[-1])
    for tool in ("uv", "uvx", "cmake", "ninja", "pip"):
        (venv / "bin" / tool).unlink(missing_ok=True)
    # The interpreter is a link to a folder with pip, which is not on the path.
    environment = {"PATH": str(venv / "bin"), "HOME": str(home), "LANG": "C.UTF-8"}
    if kept := os.environ.get("OPENBLAS_CORETYPE"):
        environment["OPENBLAS_CORETYPE"] = kept
    assert [tool for tool in ("c++", "g++", "cc", "pip", "uv") if shutil.which(tool, path=environment["PATH"])] == []
    checked = subprocess.run(
        [venv / "bin/python", "-c", "from kvferry.kernels import compiled; print(*compiled.levels())"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "portable" in checked.stdout
    command = [venv / "bin/kvferry", "up", "--model", "tiny", "--kv-memory", "64MiB", "--http", "127.0.0.1:0", "--json"]
    with (tmp_path / "log").open("w") as log:
        stack = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=log)
    try:
        assert stack.stdout is not None
        ready: dict[str, object] = {}
        while ready.get("event") != "ready":
            readable, _, _ = select.select([stack.stdout], [], [], READY_SECONDS)
            line = stack.stdout.readline() if readable else b""
            assert line, (tmp_path / "log").read_text()[-3000:]
            ready = json.loads(line)
        reply = httpx.post(
            f"http://{ready['http']}/v1/completions",
            json={"model": "tiny", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True},
            timeout=READY_SECONDS,
        )
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == 4
    finally:
        stack.terminate()
        stack.communicate(timeout=60)  # closes the pipe, too
