"""House rules that no tool of others checks."""

import ast
import operator
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = ("services", "operator", "kernels", "proto")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
MODULES = [p for root in SOURCE_ROOTS for p in sorted((ROOT / root).rglob("*.py")) if "_pb2" not in p.name]
MAX_LINES = 400


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_source_roots_are_no_packages(root: str) -> None:
    assert not (ROOT / root / "__init__.py").exists(), "operator/__init__.py would hide Python's own `operator`"
    assert not (ROOT / root / "kvferry" / "__init__.py").exists(), "it would hide the other roots' portions"


def test_the_standard_operator_module_wins_in_the_repository() -> None:
    command = [sys.executable, "-c", "import operator, collections; print(operator.__file__)"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert found.strip() == operator.__file__


def test_every_package_is_packaged_and_under_contract() -> None:
    packages = {
        f"kvferry/{p.name}": f"{root}/kvferry/{p.name}"
        for root in SOURCE_ROOTS
        for p in (ROOT / root / "kvferry").iterdir()
        if (p / "__init__.py").exists()
    }
    assert SETTINGS["tool"]["scikit-build"]["wheel"]["packages"] == packages
    assert sorted(SETTINGS["tool"]["importlinter"]["root_packages"]) == sorted(p.replace("/", ".") for p in packages)


@pytest.mark.parametrize("module", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_says_its_idea_and_stays_readable(module: Path) -> None:
    text = module.read_text("utf-8")
    assert ast.get_docstring(ast.parse(text)), "the first line says what the file is about"
    assert text.count("\n") <= MAX_LINES, "split it"
    assert module.stem not in sys.stdlib_module_names - {"__init__"} or module.stem == "operator"


def test_package_files_hold_no_logic() -> None:
    for path in MODULES:
        if path.name == "__init__.py":
            kinds = {type(node) for node in ast.parse(path.read_text("utf-8")).body}
            allowed = {ast.Expr, ast.Import, ast.ImportFrom, ast.Assign, ast.If, ast.FunctionDef}
            assert kinds <= allowed, path


def test_nothing_that_crosses_a_process_can_run_code() -> None:
    pattern = re.compile(r"\bpickle\b|\bmarshal\.|torch\.load\(|\beval\(|\bexec\(")
    for path in MODULES:
        code = "\n".join(
            line for line in ast.unparse(_without_docstrings(ast.parse(path.read_text("utf-8")))).splitlines()
        )
        assert not pattern.search(code), path


def test_tests_are_no_packages() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py")), "tests/operator/__init__.py would hide Python's own"


def test_the_lock_names_no_place() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    assert "://" not in lock
    assert "index" not in lock
    assert len(re.findall(r"^\S+==\S+", lock, re.MULTILINE)) > 50


def test_generated_code_accepts_the_locked_runtime() -> None:
    lock = dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    generated = (ROOT / "proto/kvferry/v1/common_pb2.py").read_text()
    needs = re.search(r"Protobuf Python Version: (\d+)\.", generated)
    assert needs is not None
    assert lock["protobuf"].split(".")[0] == needs[1]
    assert lock["grpcio"] == lock["grpcio-tools"]


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [
                n for n in node.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
            ] or [ast.Pass()]
    return tree
