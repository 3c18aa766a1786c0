"""Warnings about sizes: long modules, full folders and long chains of imports. Never a reason to fail.

The order of the rooms is checked by import contracts (`imports.toml`); a size only says where a
second idea may hide.

    python -m harness.house.sizes
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCE_ROOTS = ("services", "operator", "kernels")
MAX_LINES, MAX_MODULES, MAX_CHAIN = 400, 14, 6


def warnings() -> list[str]:
    """Return one line for each module, folder and chain above its soft limit."""
    files = [
        path for root in SOURCE_ROOTS for path in sorted((ROOT / root).rglob("*.py")) if path.name != "__init__.py"
    ]
    found = []
    for path in files:
        lines = path.read_text("utf-8").count("\n")
        if lines > MAX_LINES:
            found.append(f"{path.relative_to(ROOT)} has {lines} lines (soft limit {MAX_LINES})")
    for folder in sorted({path.parent for path in files}):
        modules = {path for path in files if path.parent == folder}
        if len(modules) > MAX_MODULES:
            found.append(f"{folder.relative_to(ROOT)} has {len(modules)} modules (soft limit {MAX_MODULES})")
        if (chain := _longest_chain(modules)) > MAX_CHAIN:
            found.append(f"{folder.relative_to(ROOT)} has a chain of {chain} imports (soft limit {MAX_CHAIN})")
    return found


def _longest_chain(modules: set[Path]) -> int:
    """Return the largest number of modules of one folder of which each imports the next."""
    names = {_dotted(path): path for path in modules}
    imports = {name: _imports(path) & names.keys() for name, path in names.items()}
    depth: dict[str, int] = {}

    def chain(module: str) -> int:
        if module not in depth:
            depth[module] = 0  # ends the recursion at a cycle, which an import would reject
            depth[module] = 1 + max((chain(other) for other in imports[module]), default=0)
        return depth[module]

    return max(map(chain, imports), default=0)


def _dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts[1:])


def _imports(path: Path) -> set[str]:
    """Return the modules that a file imports at its top level."""
    found: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


if __name__ == "__main__":
    for warning in warnings():
        print(f"warning: {warning}")
