"""House rules that no other tool checks."""

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
ROOMS = sorted({p.parent for p in MODULES})


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_source_roots_are_not_packages(root: str) -> None:
    assert not (ROOT / root / "__init__.py").exists(), "operator/__init__.py would hide Python's own `operator`"
    assert not (ROOT / root / "kvferry" / "__init__.py").exists(), (
        "a kvferry/__init__.py would hide the packages of the other source roots"
    )


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
    definitions = {"kvferry/operator/crds": "charts/kvferry/files/crds"}  # data
    assert SETTINGS["tool"]["scikit-build"]["wheel"]["packages"] == packages | definitions
    contracts = tomllib.loads((ROOT / "imports.toml").read_text())["tool"]["importlinter"]
    assert sorted(contracts["root_packages"]) == sorted(p.replace("/", ".") for p in packages)


@pytest.mark.parametrize("module", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_has_a_docstring(module: Path) -> None:
    assert ast.get_docstring(ast.parse(module.read_text("utf-8"))), "a module begins with a docstring"
    assert module.stem not in sys.stdlib_module_names - {"__init__"} or module.stem == "operator"


@pytest.mark.parametrize("folder", ROOMS, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_folder_has_a_docstring(folder: Path) -> None:
    assert (folder / "__init__.py").exists() or folder.name in {"kvferry", *SOURCE_ROOTS}


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


def test_the_files_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|hpp|cpp))`", text))
    places = [ROOT, *(ROOT / root / "kvferry" for root in SOURCE_ROOTS)]
    assert len(named) > 80
    assert [name for name in sorted(named) if not any((place / name).exists() for place in places)] == []
    rooms = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+)`", text))
    assert [
        name for name in sorted(rooms) if not any((place / name).is_dir() for place in (*places, ROOT / "kernels"))
    ] == []


def test_files_that_any_page_of_the_docs_names_exist() -> None:
    """A page may name a file by the end of its path: `batch_slots.py`, `kv/registry.py`."""
    pages = [page for page in (*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")) if page.parent.name != "changes"]
    folders = ("services", "operator", "kernels", "proto", "tests", "charts")
    files = ["/" + str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.*")]
    named = {
        (str(page.relative_to(ROOT)), name)
        for page in pages
        for name in re.findall(r"`([a-z_0-9/]+\.(?:py|hpp|cpp|proto))`", page.read_text("utf-8"))
    }
    assert len(named) > 150
    assert sorted((page, name) for page, name in named if not any(file.endswith("/" + name) for file in files)) == []


def test_lines_of_the_docs_fit_the_screen() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    long = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in pages
        for number, line in enumerate(page.read_text("utf-8").splitlines(), 1)
        if len(line) > 120 and not line.lstrip().startswith("|") and "](" not in line
    ]
    assert long == []


def test_tests_are_not_packages() -> None:
    packages = [p.relative_to(ROOT).parts for p in (ROOT / "tests").rglob("__init__.py")]
    assert all(p[1] == "harness" for p in packages), "tests/operator/__init__.py would hide Python's own `operator`"


LOCKS = sorted(path.name for path in ROOT.glob("requirements*.lock"))


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_hashes_and_names_no_index_or_path(name: str) -> None:
    lock = (ROOT / name).read_text()
    assert "://" not in lock
    assert "index" not in lock
    entries = re.split(r"^(?=\S)", lock, flags=re.MULTILINE)[1:]
    assert entries
    assert [entry.split()[0] for entry in entries if "==" not in entry or "--hash=sha256:" not in entry] == []


@pytest.mark.parametrize("part", ["requirements-run.lock", "requirements-build.lock"])
def test_the_parts_of_the_lock_have_its_versions(part: str) -> None:
    whole, some = (
        {*re.findall(r"^\S+==\S+", (ROOT / name).read_text(), re.MULTILINE)} for name in ("requirements.lock", part)
    )
    assert some <= whole


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


def test_types_that_threads_convert_to_are_described_when_their_module_is_imported() -> None:
    """See `kvferry.core.process.struct_types`: the first use of a type by two threads ends the process."""
    missing = []
    for path in MODULES:
        text = path.read_text("utf-8")
        converts = {"msgspec.convert", *({"unpacked"} if "interface.packed import" in text else ())}
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        described = {
            ast.unparse(c.args[0]) for c in calls if ast.unparse(c.func) in {"describe", "msgspec.json.Decoder"}
        }
        for call in calls:
            name = ast.unparse(call.func)
            kinds = [
                keyword.value for keyword in call.keywords if keyword.arg == "type" and name.startswith("msgspec.")
            ]
            kinds += call.args[1:2] if name in converts else []
            missing += [f"{path}: {ast.unparse(k)}" for k in kinds if ast.unparse(k) not in described | {"str", "kind"}]
    assert missing == []
