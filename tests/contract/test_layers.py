"""Import contracts of `imports.toml`: each is broken by a module that violates it, and no other one is.

Without the violations, a contract with outdated module names or a wrong setting would pass unnoticed.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = ("services", "operator", "kernels", "proto")
SETTINGS = tomllib.loads((ROOT / "imports.toml").read_text())["tool"]["importlinter"]
CONTRACTS = [contract["name"] for contract in SETTINGS["contracts"]]
FLOORS = {contract["containers"][0]: contract for contract in SETTINGS["contracts"] if "containers" in contract}
"""Contracts of the floors inside of a package, by package."""
MAX_ENTRIES = 9
"""Largest number of modules and folders on a floor: as many as a reader takes in at a glance."""

VIOLATIONS = [
    ("The house is layered", "services/kvferry/kv/fetcher.py", "import kvferry.engine.schedule.step.step"),
    ("The house is layered", "services/kvferry/gateway/decide/config.py", "import kvferry.stack.plan.restarts"),
    ("The house is layered", "services/kvferry/cli/timeline.py", "from kvferry.testing import tier_suite"),
    (
        "The engine imports the connector, never a transport or a tier",
        "services/kvferry/engine/execute/run/runner.py",
        "from kvferry.kv.connectors import shm",
    ),
    (
        "Only the offline API of the engine knows text serving",
        "services/kvferry/engine/build.py",
        "import kvferry.serving.token_source",
    ),
    ("Only the edges speak gRPC", "services/kvferry/engine/offline/run.py", "import grpc.aio"),
    ("Only the edges speak gRPC", "services/kvferry/kv/registry.py", "from google.protobuf import message"),
    (
        "Only the exporter of traces imports OpenTelemetry",
        "services/kvferry/gateway/decide/lifecycle/sample_run.py",
        "import opentelemetry.trace",
    ),
    (
        "Bodies and answers are made without the fleet",
        "services/kvferry/gateway/http/fields/strict.py",
        "import kvferry.gateway.fleet.fleet",
    ),
    (
        "The client loads gRPC and the values that it sends",
        "services/kvferry/client/responses.py",
        "def as_array():\n    import numpy",
    ),
    (
        "The client loads gRPC and the values that it sends",
        "services/kvferry/core/inference/chunks.py",
        "import kvferry.core.hashing",
    ),
    ("The control plane carries no tensors", "services/kvferry/gateway/fleet/fleet.py", "import torch.nn"),
    ("Decisions are pure", "services/kvferry/engine/schedule/plan/scheduler.py", "import threading"),
    ("Decisions are pure", "services/kvferry/kv/handoff/offers.py", "def now():\n    import asyncio"),
    ("Decisions are pure", "services/kvferry/kv/tiers/policy/breaker.py", "import threading"),
    (
        "The simulator imports decisions, not the shells around them",
        "services/kvferry/simulator/clock.py",
        "import kvferry.gateway.fleet.stall_detector",
    ),
    ("What ships needs no tests", "services/kvferry/testing/tier_suite.py", "import harness.idle"),
    ("What ships needs no tests", "services/kvferry/bench/rows.py", "import pytest"),
    (
        "Tiers have floors",
        "services/kvferry/kv/tiers/disk/disk_tier.py",
        "from kvferry.kv.tiers.redis import redis_tier",
    ),
    (
        "Connectors do not import each other",
        "services/kvferry/kv/connectors/shm.py",
        "from kvferry.kv.connectors import nixl",
    ),
]

# Without `site`, no .pth file is processed, so an editable install's finder, which would precede the path, is absent.
# The linter reads the files without importing them.
LINT = """
import sys
site_packages, *roots = sys.argv[1:]
sys.path[1:1] = [*roots, site_packages]
from importlinter.cli import lint_imports
sys.exit(lint_imports(config_filename="imports.toml", no_cache=True))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the Python files of the source roots and of the contracts, which tests may change."""
    target = tmp_path_factory.mktemp("layers")
    shutil.copy(ROOT / "imports.toml", target)
    for path in (p for root in SOURCE_ROOTS for p in (ROOT / root / "kvferry").rglob("*.py")):
        to = target / path.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, to)
    return target


def verdicts(tree: Path) -> dict[str, bool]:
    """Return whether each contract is kept, as the linter reports it for the copy at `tree`."""
    roots = [str(tree / root) for root in SOURCE_ROOTS]
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", LINT, sysconfig.get_path("purelib"), *roots],
        cwd=tree,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    results = dict(re.findall(r"^(.+?) (KEPT|BROKEN)(?: \(\d+ ignored imports?\))?$", done.stdout, re.MULTILINE))
    assert sorted(results) == sorted(CONTRACTS), done.stdout + done.stderr
    assert (done.returncode == 0) == (set(results.values()) == {"KEPT"})
    return {name: verdict == "KEPT" for name, verdict in results.items()}


def test_the_tree_keeps_every_contract(copy: Path) -> None:
    assert verdicts(copy) == dict.fromkeys(CONTRACTS, True)


def rounds() -> list[list[tuple[str, str, str]]]:
    """Return the violations in rounds, in each of which a contract is violated at most once: the linter reads the whole
    tree, so that one run for each violation would take minutes."""
    found: list[list[tuple[str, str, str]]] = [[]]
    for violation in VIOLATIONS:
        free = next((each for each in found if violation[0] not in {name for name, *_ in each}), None)
        if free is None:
            found.append(free := [])
        free.append(violation)
    return found


def broken(tree: Path, violations: list[tuple[str, str, str]]) -> set[str]:
    """Return the contracts that the violations break: a line at the end of a module of `tree`, or a new module."""
    texts = {
        tree / module: (tree / module).read_text("utf-8") for _, module, _ in violations if (tree / module).exists()
    }
    try:
        for _, module, line in violations:
            with (tree / module).open("a", encoding="utf-8") as file:
                file.write(f"\n{line}\n")
        return {name for name, kept in verdicts(tree).items() if not kept}
    finally:
        for _, module, _ in violations:
            (tree / module).unlink()
        for path, text in texts.items():
            path.write_text(text, "utf-8")


@pytest.mark.parametrize("violations", rounds())
def test_a_violation_breaks_its_contract_and_no_other(violations: list[tuple[str, str, str]], copy: Path) -> None:
    assert broken(copy, violations) == {contract for contract, *_ in violations}


def test_a_floor_that_imports_a_higher_one_breaks_the_contract_of_its_package(copy: Path) -> None:
    violations = []
    for package, contract in FLOORS.items():
        floors = [[name.strip() for name in floor.split("|")] for floor in contract["layers"]]
        higher = floors[-2][0] if len(floors) > 1 else floors[-1][1]  # on one floor, the entries are independent
        lower, line = floors[-1], f"import {package}.{higher}"
        violations.append((contract["name"], str(_file(copy, f"{package}.{lower[0]}").relative_to(copy)), line))
    assert {name for name, *_ in violations} - broken(copy, violations) == set()


def test_a_module_without_a_floor_breaks_the_contract_of_its_package(copy: Path) -> None:
    folders = {package: _file(copy, package).parent.relative_to(copy) for package in FLOORS}
    violations = [(FLOORS[package]["name"], str(folder / "stray.py"), "") for package, folder in folders.items()]
    assert broken(copy, violations) == {contract["name"] for contract in FLOORS.values()}


def test_every_contract_has_a_violation() -> None:
    floors = {contract["name"] for contract in FLOORS.values()}
    assert {contract for contract, *_ in VIOLATIONS} | floors == set(CONTRACTS)


def test_every_package_with_folders_has_floors() -> None:
    roots = [ROOT / root for root in SOURCE_ROOTS]
    folders = [path.parent for root in roots for path in (root / "kvferry").rglob("__init__.py")]
    parents = {folder.parent for folder in folders if folder.parent.name != "kvferry"}
    packages = {".".join(p.relative_to(next(r for r in roots if r in p.parents)).parts) for p in parents}
    assert packages - FLOORS.keys() == set()


@pytest.mark.parametrize("package", FLOORS)
def test_a_floor_has_few_entries(package: str) -> None:
    floors = [floor.split("|") for floor in FLOORS[package]["layers"]]
    assert [floor for floor in floors if len(floor) > MAX_ENTRIES] == []


def _file(tree: Path, module: str) -> Path:
    """Return the file of a module or package."""
    for root in SOURCE_ROOTS:
        path = tree / root / module.replace(".", "/")
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.exists():
                return file
    raise AssertionError(f"no file of {module}")
