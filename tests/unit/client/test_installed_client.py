"""The client library as another service installs it: `pip install kvferry[client]`, without a model server."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

import pytest
from harness.fakes.scripted_gateway import scripted_gateway
from harness.kube.python_image import closure
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
_OWN = re.compile(
    r"kvferry(\.client(\.\w+)?|\.core(\.(constraint|errors|inference(\.\w+)?|limits|pausing|retention|sampling))?"
    r"|\.rpc(\.(channel|errors|retention_wire|wire))?|\.v1(\.(common_pb2|inference_pb2|inference_pb2_grpc))?)?"
)
"""The modules of kvferry that a client consists of."""
_OTHERS = {"cython_runtime", "google", "typing_extensions"} | {"grpc", "grpc_health", "grpc_reflection", "grpc_tools"}
"""Packages that may be loaded: gRPC with what it requires and with its own additions if installed, and protobuf."""
_IMPORT = """
import sys
before = set(sys.modules)
import kvferry.client
print(*sorted(set(sys.modules) - before))
"""
_CALL = """
import sys
from kvferry.client import Client, SamplingParams

with Client(sys.argv[1], timeout=20) as client:
    (answer,) = client.complete([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=8, seed=3))
    (vector,) = client.embed(["hello"], dimensions=4)
    print(len(answer.tokens), answer.timing.handoff_outcome, len(vector.values), client.model_info().model)
"""


def test_a_client_loads_grpc_and_its_own_modules_only():
    loaded = _run([sys.executable, "-c", _IMPORT]).stdout.split()
    assert [name for name in loaded if name.startswith("kvferry") and not _OWN.fullmatch(name)] == []
    packages = {name.partition(".")[0] for name in loaded} - {"kvferry"} - sys.stdlib_module_names
    assert {name for name in packages - _OTHERS if not name.startswith("_cython_")} == set()


async def test_an_installed_client_calls_a_gateway_without_the_packages_of_a_server(tmp_path):
    python = await asyncio.to_thread(_installed, tmp_path)
    async with scripted_gateway() as running:
        call = [str(python), "-W", "error", "-c", _CALL, running.gateway.listening.grpc]
        done = await asyncio.to_thread(_run, call, clean=True)
    assert done.stdout.split() == ["8", "fetched", "4", "bytes"]

    for missing in ("click", "numpy", "torch"):
        assert (
            _run([str(python), "-c", f"import {missing}"], status=1, clean=True).stderr.count("ModuleNotFoundError")
            == 1
        )
    for command in (["up"], ["--help"], ["bench", "serve"]):
        refused = _run([str(python.with_name("kvferry")), *command], status=2, clean=True)
        assert refused.stderr == "Error: click is not installed; install it with: pip install 'kvferry[serve]'\n"


@pytest.mark.parametrize(
    ("missing", "command", "extra"),
    [("click", "up", "serve"), ("starlette", "gateway", "serve"), ("kubernetes", "operator run", "operator")],
)
def test_a_command_names_the_extra_of_a_package_that_is_not_installed(missing, command, extra):
    hidden = f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['kvferry', *{command!r}.split()]"
    refused = _run([sys.executable, "-c", f"{hidden}; from kvferry.cli.entry import main; main()"], status=2)
    assert refused.stderr == f"Error: {missing} is not installed; install it with: pip install 'kvferry[{extra}]'\n"


def _installed(folder: Path) -> Path:
    """Install the wheel and what it requires into an empty environment; return the interpreter. The requirements are
    copied from the environment of the tests, so that no index is asked."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    build += ["--no-build-isolation", "--config-settings=wheel.cmake=false", "--config-settings=wheel.py-api=py3"]
    build += ["--wheel-dir", str(folder), str(ROOT)]
    _run(build)
    (wheel,) = folder.glob("*.whl")
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")])
    python = folder / "venv/bin/python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    _run([*install, "--disable-pip-version-check", f"{wheel}[client]"])
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    for name in _required(wheel, "client"):
        for distribution in closure(name, ()).values():
            for path in distribution.files or ():
                target = site / path
                if ".." not in path.parts and not target.exists():  # without the programs of the packages
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.symlink_to(path.locate())
    return python


def _required(wheel: Path, extra: str) -> Iterable[str]:
    """Return the names of the packages that a wheel requires with an extra."""
    with ZipFile(wheel) as opened:
        (metadata,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        lines = HeaderParser().parsestr(opened.read(metadata).decode()).get_all("Requires-Dist", [])
    needs = list(map(Requirement, lines))
    return [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]


def _run(command: list[str], status: int = 0, *, clean: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command; a clean one without the variables that add to the path of Python."""
    environment = {name: value for name, value in os.environ.items() if not (clean and name.startswith("PYTHON"))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == status, done.stderr[-2000:]
    return done
