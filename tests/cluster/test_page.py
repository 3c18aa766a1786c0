"""All commands of docs/try-on-kubernetes.md in order, on a node."""

import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.house.documents import Fence, fences
from harness.pools.on_node import CLOCK, MODEL

from kvferry.bench.commit import ROOT
from kvferry.core.process.config import child_environment

pytestmark = [pytest.mark.cluster, pytest.mark.node, pytest.mark.timeout(400)]

SECONDS = 300


def test_all_commands_of_the_page_work_in_order(kube_node: Any, say: Callable[[str], None], tmp_path: Path) -> None:
    kube_node.cluster.keep_model(MODEL)  # `make cluster-up` does this too
    wanted = [fence for fence in fences() if fence.mark == "node"]
    assert {fence.language for fence in wanted} == {"sh"}, "each block must be a shell command"
    assert {fence.document for fence in wanted} == {"docs/try-on-kubernetes.md"}
    binaries = kube_node.cluster.assets.folder
    env = child_environment(
        {
            "KUBECONFIG": str(kube_node.kubeconfig),
            "PATH": f"{binaries}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(tmp_path),
        }
    )
    clock = CLOCK
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = {"8000": one.getsockname()[1], "9000": other.getsockname()[1]}
    began = clock.monotonic()
    # One shell runs all blocks, because the port-forward in its background serves later blocks.
    shell = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", script(wanted, ports)],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    parts = []
    assert shell.stdout is not None
    with shell:
        for line in shell.stdout:
            parts.append(line)
            if line.startswith("=== "):
                say(f"page, line {line.split()[1]}, {clock.monotonic() - began:.1f} s after its beginning")
    text = "".join(parts)
    assert shell.returncode == 0, text
    assert '"handoff_outcome":"fetched"' in text
    assert '"error"' not in text, text
    assert "Ready=True" in text


def script(wanted: list[Fence], ports: dict[str, int]) -> str:
    """Return a script of all blocks in order; processes in the background are ended at its end."""
    lines = ["trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"]
    for fence in wanted:
        code = fence.code
        for written, free in ports.items():
            code = re.sub(rf"(?<=localhost:){written}\b|(?<= ){written}(?=:)", str(free), code)
        lines += [f"echo; echo '=== {fence.line}'", code]
    return "\n".join(lines)
