"""Import contracts: each is broken by a module that violates it, and no other one is.

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
CONTRACTS = [
    c["name"] for c in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
]

VIOLATIONS = [
    ("The house is layered", "services/kvferry/kv/fetcher.py", "import kvferry.engine.plan.step"),
    ("The house is layered", "services/kvferry/gateway/config.py", "import kvferry.stack.plan.restarts"),
    ("The house is layered", "services/kvferry/cli/timeline.py", "from kvferry.testing import tier_suite"),
    (
        "The engine imports the connector, never a transport or a tier",
        "services/kvferry/engine/run/runner.py",
        "from kvferry.kv.connectors import shm",
    ),
    ("Only the edges speak gRPC", "services/kvferry/engine/llm.py", "import grpc.aio"),
    ("Only the edges speak gRPC", "services/kvferry/kv/registry.py", "from google.protobuf import message"),
    (
        "Only the exporter of traces imports OpenTelemetry",
        "services/kvferry/gateway/tracing/sample_trace.py",
        "import opentelemetry.trace",
    ),
    (
        "Bodies and answers are made without the fleet",
        "services/kvferry/gateway/http/fields/strict.py",
        "import kvferry.gateway.fleet.fleet",
    ),
    ("The control plane carries no tensors", "services/kvferry/gateway/fleet/fleet.py", "import torch.nn"),
    ("Decisions are pure", "services/kvferry/engine/plan/scheduler.py", "import threading"),
    ("Decisions are pure", "services/kvferry/kv/handoff/offers.py", "def now():\n    import asyncio"),
    ("Decisions are pure", "services/kvferry/kv/tiers/policy/breaker.py", "import threading"),
    (
        "The simulator imports decisions, not the shells around them",
        "services/kvferry/simulator/clock.py",
        "import kvferry.gateway.fleet.step_watch",
    ),
    ("What ships needs no tests", "services/kvferry/testing/tier_suite.py", "import harness.idle"),
    ("What ships needs no tests", "services/kvferry/bench/rows.py", "import pytest"),
    (
        "Tiers do not import each other",
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
sys.exit(lint_imports(config_filename="pyproject.toml", no_cache=True))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the Python files of the source roots and of the contracts, which tests may change."""
    target = tmp_path_factory.mktemp("layers")
    shutil.copy(ROOT / "pyproject.toml", target)
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


@pytest.mark.parametrize(("contract", "module", "line"), VIOLATIONS)
def test_a_violation_breaks_its_contract_and_no_other(contract: str, module: str, line: str, copy: Path) -> None:
    path = copy / module
    text = path.read_text("utf-8")
    try:
        path.write_text(f"{text}\n{line}\n", "utf-8")
        assert [name for name, kept in verdicts(copy).items() if not kept] == [contract]
    finally:
        path.write_text(text, "utf-8")


def test_every_contract_has_a_violation() -> None:
    assert {contract for contract, *_ in VIOLATIONS} == set(CONTRACTS)
