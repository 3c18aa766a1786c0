"""Stages this machine's C compiler for an image, with what it needs to build an extension module.

Triton compiles a small extension module in the pod, for which it looks for `gcc` on the PATH. The compiler itself
prints the programs, libraries and headers that it uses, so this works on any distribution with gcc.
"""

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

from kvferry.core.errors import Unavailable

_PROGRAMS = ("cc1", "collect2", "as", "ld")
_FILES = (
    "crti.o", "crtn.o", "crtbeginS.o", "crtendS.o", "libgcc.a", "libgcc_s.so", "libgcc_s.so.1", "libc.so", "libc.so.6",
    "libc_nonshared.a", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "liblto_plugin.so",
)  # fmt: skip
"""Files that the linker reads to build a shared library, as far as the compiler has them."""
_HEADERS = (
    "assert", "complex", "ctype", "dlfcn", "errno", "fcntl", "fenv", "float", "inttypes", "limits", "locale", "math",
    "pthread", "setjmp", "signal", "stdarg", "stdatomic", "stdbool", "stddef", "stdint", "stdio", "stdlib", "string",
    "strings", "sys/stat", "sys/time", "sys/types", "sys/wait", "time", "unistd", "wchar", "wctype",
)  # fmt: skip
"""The headers of C and POSIX that Python.h and Triton's sources include."""
_SECONDS = 60.0

Linked = Callable[[Iterable[Path]], set[Path]]


def stage(root: Path, linked: Linked) -> None:
    """Copy the compiler below `root`, each file to its path on this machine, and the driver to /usr/bin/gcc.

    Args:
        root: root folder of the image.
        linked: function that returns the shared libraries of programs.

    Raises:
        Unavailable: this machine has no gcc.
    """
    driver = shutil.which("gcc")
    if driver is None:
        raise Unavailable("an image for GPUs needs a C compiler for Triton; install gcc")
    programs = [Path(driver), *(_program(driver, name) for name in _PROGRAMS)]
    files = {found for name in _FILES if (found := _file(driver, name)) is not None}
    plugin = [path for path in files if path.name == "liblto_plugin.so"]
    for path in files | linked([*programs, *plugin]) | _headers(driver):
        _copy(path, root / str(path).lstrip("/"))
    for path in programs:
        _copy(path, root / str(path).lstrip("/"))
    _copy(Path(driver), root / "usr" / "bin" / "gcc")


def _program(driver: str, name: str) -> Path:
    found = _asked(driver, f"-print-prog-name={name}")
    path = found if "/" in found else shutil.which(found)
    if path is None:
        raise Unavailable(f"gcc uses the program {name!r}, which is not installed; install binutils")
    return Path(os.path.normpath(path))


def _file(driver: str, name: str) -> Path | None:
    found = _asked(driver, f"-print-file-name={name}")
    return Path(os.path.normpath(found)) if "/" in found else None


def _headers(driver: str) -> set[Path]:
    """Return the files that a source with Python.h and all of `_HEADERS` includes. Debian's pyconfig.h is not in the
    folder of Python.h."""
    include = sysconfig.get_path("include")
    names = [*_HEADERS, "Python"] if Path(include, "Python.h").exists() else list(_HEADERS)
    source = "".join(f"#include <{name}.h>\n" for name in names)
    words = ("-M", "-O3", "-D_GNU_SOURCE", f"-I{include}", "-x", "c", "-")
    listed = _asked(driver, *words, source=source).replace("\\\n", " ").split()
    return {Path(os.path.normpath(word)) for word in listed if word.endswith(".h") and word.startswith("/")}


def _asked(driver: str, *words: str, source: str = "") -> str:
    done = subprocess.run([driver, *words], input=source, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        raise Unavailable(f"{driver} {' '.join(words)} failed: {done.stderr.strip()[-500:]}")
    return done.stdout.strip()


def _copy(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy2(path, target)  # copy the target of a link under the link's name
