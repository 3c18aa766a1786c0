"""The programs of docs/grpc.md in Go and Node, built as the page says and run against a stack."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.kube import toolchain
from harness.servers.processes import running

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs/examples/grpc"
ADDRESSES = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--log-level", "error", "--json")
QUESTION = "What is the capital of France?"
PLUGINS = (
    "google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12",
    "google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2",
)
SECONDS = 600.0

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running("up", "--model", "smollm2-135m-instruct", "--kv-memory", "256MiB", *ADDRESSES) as stack:
        yield str(stack.wait_for("ready")["grpc"])
        assert stack.stop() == 0


def output_of(command: list[str], folder: Path, **environment: str) -> str:
    env = {**os.environ, **environment}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_go_program_streams_an_answer(address: str, tmp_path: Path) -> None:
    go = toolchain.find("1.26.0")
    shutil.copytree(EXAMPLES / "go", tmp_path / "go")
    settings = {"GOBIN": str(tmp_path / "bin"), "GOFLAGS": "-buildvcs=false", "CGO_ENABLED": "0"}
    for plugin in PLUGINS:
        output_of([go, "install", "-p", "2", plugin], tmp_path, **settings)
    module = "module=kvferry.dev/kvferry"
    flags = ["--go_out=.", f"--go_opt={module}", "--go-grpc_out=.", f"--go-grpc_opt={module}"]
    files = ["kvferry/v1/common.proto", "kvferry/v1/inference.proto"]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "proto")]
    output_of([*protoc, *flags, *files], tmp_path / "go", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    output_of([go, "build", "-p", "2", "-mod=readonly", "-o", "client", "."], tmp_path / "go", **settings)
    assert "Paris" in output_of([str(tmp_path / "go/client"), address, QUESTION], tmp_path)


def test_the_node_program_streams_an_answer(address: str, tmp_path: Path) -> None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    shutil.copytree(EXAMPLES / "node", tmp_path / "node")
    output_of([npm, "ci", "--no-audit", "--no-fund"], tmp_path / "node")
    client = [node, "client.mjs", str(ROOT / "proto")]
    assert "Paris" in output_of([*client, address, QUESTION], tmp_path / "node")
    refused = subprocess.run(
        [*client, "127.0.0.1:1", QUESTION],
        cwd=tmp_path / "node", capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert refused.returncode == 1
    assert "UNAVAILABLE" in refused.stderr
