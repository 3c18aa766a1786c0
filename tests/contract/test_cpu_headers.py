"""Files of the compiled CPU kernels: every header parses alone, and folders include only themselves and those below."""

import importlib
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CPU = ROOT / "kernels" / "cpu"
FOLDERS = ("data", "runtime", "simd", "weights", "products", "attention", "step", "bench", "levels")  # lowest first
HEADERS = sorted(str(p.relative_to(CPU)) for p in CPU.rglob("*.hpp"))
SOURCES = sorted(str(p.relative_to(CPU)) for p in CPU.rglob("*.[ch]pp"))
MAX_FILES, MAX_LINES, MAX_COLUMNS = 12, 400, 120

COMPILER = next(
    (found for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name and (found := shutil.which(name))), None
)
X86 = platform.machine() in ("x86_64", "AMD64")
PORTABLE = "portable"
TARGETS = {"avx2": "KVFERRY_TARGET_AVX2", "avx512": "KVFERRY_TARGET_AVX512_BF16", "amx": "KVFERRY_TARGET_AMX_BF16"}


def _targets(header: str) -> tuple[str, ...]:
    """Return the levels for which a header is parsed: portable, and also AMX (which includes all others) if its text
    depends on a level.
    """
    if header.startswith("simd/vec_avx"):
        return (header.removeprefix("simd/vec_").removesuffix(".hpp"),)
    depends = re.search(r"\bKVFERRY_(PAIRS|AMX)\b", (CPU / header).read_text())
    return (PORTABLE, "amx") if depends and X86 else (PORTABLE,)


def _flags(target: str) -> list[str]:
    if target == PORTABLE:
        return []
    cmake = (ROOT / "CMakeLists.txt").read_text()
    options = dict(re.findall(r'set\(KVFERRY_FLAGS_(\w+) "([^"]*)"', cmake))
    assert target in options, f"CMakeLists.txt has no flags for the level {target}"
    flags = re.sub(r"\$\{KVFERRY_FLAGS_(\w+)\}", lambda found: options[found[1]], options[target])
    return [f"-D{TARGETS[target]}", *flags.split(";")]


def _own_includes(source: str) -> Iterator[str]:
    yield from re.findall(r'^#include "([^"]+)"', (CPU / source).read_text(), re.MULTILINE)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("header", HEADERS)
def test_a_header_parses_alone(header: str) -> None:
    if not X86 and header.startswith("simd/vec_avx"):
        pytest.skip("the header is for x86 only")
    assert COMPILER is not None
    for target in _targets(header):
        command = [COMPILER, "-std=c++20", "-fsyntax-only", "-x", "c++", f"-I{CPU}", *_flags(target)]
        if "nanobind" in (CPU / header).read_text():
            command += [f"-I{importlib.import_module('nanobind').include_dir()}", f"-I{sysconfig.get_path('include')}"]
        command.append("-")
        done = subprocess.run(command, input=f'#include "{header}"\n', capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{header} for {target}:\n{done.stderr[:4000]}"


@pytest.mark.parametrize("source", SOURCES)
def test_a_file_includes_only_from_its_folder_and_those_below(source: str) -> None:
    own, _, name = source.rpartition("/")
    level = FOLDERS.index(own) if name != source else len(FOLDERS)
    for included in _own_includes(source):
        assert (CPU / included).is_file(), f"{included}: an include must be a path relative to kernels/cpu"
        if "/" not in included:
            assert level == len(FOLDERS), f"{source} includes {included}, which only programs may include"
            continue
        assert FOLDERS.index(included.split("/")[0]) <= level, f"{source} includes {included} of a higher folder"


def test_headers_have_no_cyclic_includes() -> None:
    graph = {header: set(_own_includes(header)) for header in HEADERS}
    while leaves := {header for header, needs in graph.items() if not needs}:
        graph = {header: needs - leaves for header, needs in graph.items() if header not in leaves}
    assert not graph, "headers include each other in a cycle"


@pytest.mark.parametrize("folder", [".", *FOLDERS])
def test_a_folder_is_small_and_has_a_readme(folder: str) -> None:
    files = [p for p in (CPU / folder).iterdir() if p.is_file()]
    assert len(files) <= MAX_FILES, "too many files: split the folder by topic"
    assert (CPU / folder / "README.md").is_file()


def test_every_folder_has_its_place_in_the_order() -> None:
    assert {p.name for p in CPU.iterdir() if p.is_dir()} == set(FOLDERS)
    order = re.findall(r'"\^"?(\w+)/', (ROOT / ".clang-format").read_text().replace("'", '"'))
    assert tuple(order) == FOLDERS, ".clang-format sorts includes in another order"


@pytest.mark.parametrize("source", SOURCES)
def test_a_file_stays_readable(source: str) -> None:
    lines = (CPU / source).read_text().splitlines()
    assert len(lines) <= MAX_LINES, "too many lines: split the file"
    assert [number for number, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS] == [], "lines are too long"
