"""Every command in README and docs is run against a real stack.

Fences marked `sh` and `python` are run unchanged, with the addresses of the test's own stack, and their output has the
effect that a comment before the fence states: `<!-- test: expect "PATTERN" -->`. A fence after `<!-- test: serve -->`
is the command that starts that stack. `make` commands run this test suite or set up its environment, so only the
existence of their targets is checked; `make run` is run.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.house.documents import DOCUMENTS, Fence, fences
from harness.servers.processes import running

from kvferry.bench.commit import ROOT
from kvferry.core.process.config import child_environment

SECONDS = 240


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The real addresses, by the addresses 127.0.0.1:8000 and 127.0.0.1:9000 of the documents."""
    # One gateway of a machine runs the batches of the default folder, and other tests run beside this one.
    folder = str(tmp_path_factory.mktemp("batches"))
    flags = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--batch-folder", folder)
    with running("up", *flags, "--json") as process:
        ready = process.wait_for("ready")
        yield {"127.0.0.1:8000": str(ready["http"]), "127.0.0.1:9000": str(ready["grpc"])}
        assert process.stop() == 0


def run(fence: Fence, addresses: dict[str, str]) -> None:
    code = fence.code
    for written, real in addresses.items():
        code = code.replace(written, real)
    command = [sys.executable, "-c", code] if fence.language == "python" else ["bash", "-euo", "pipefail", "-c", code]
    environment = child_environment({"PATH": f"{Path(sys.executable).parent}:{os.defpath}"})
    for name in ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "ARGS"):  # variables of the `make test` that runs this test
        environment.pop(name, None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, f"{fence.document}:{fence.line}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    assert '"error"' not in done.stdout, done.stdout
    for pattern in fence.expected:
        assert re.search(pattern, done.stdout, re.MULTILINE), (
            f"{fence.document}:{fence.line}: no {pattern!r} in\n{done.stdout}"
        )


def targets_of(fence: Fence) -> list[str]:
    """Return the targets of a fence of `make` commands."""
    return re.findall(r"^make (\S+)", fence.code, re.MULTILINE)


def is_run(fence: Fence) -> bool:
    """Return whether a fence is run here: neither started by the fixture, nor in a cluster, nor this test suite."""
    return not fence.mark and (not targets_of(fence) or fence.code.strip() == "make run")


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize(
    "fence", [f for f in fences() if f.mark not in ("node", "cluster")], ids=lambda f: f"{f.document}:{f.line}"
)
def test_a_documented_command_works(fence: Fence, stack: dict[str, str]) -> None:
    if fence.mark == "serve":
        assert fence.code.strip() == "kvferry up", "the fixture runs this command with other ports"
        return
    for target in targets_of(fence):
        subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True, timeout=60)
    if is_run(fence):
        run(fence, stack)


@pytest.mark.parametrize("fence", list(filter(is_run, fences())), ids=lambda f: f"{f.document}:{f.line}")
def test_the_effect_of_a_documented_command_is_stated(fence: Fence) -> None:
    assert fence.expected, 'put <!-- test: expect "PATTERN" --> before the fence'


def test_every_document_was_looked_at_and_the_readme_has_its_first_requests() -> None:
    readme = [f for f in fences() if f.document == "README.md"]
    text = "".join(f.code for f in readme)
    for part in ("make run", "make test", "kvferry up", "curl", "OpenAI(", "Client("):
        assert part in text


def test_links_between_documents_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text("utf-8")):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.relative_to(ROOT)} points at {target}"
