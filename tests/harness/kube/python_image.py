"""Builds the self-contained image of kvferry: Python interpreter, libraries, packages and kvferry.

The image has three layers, the least frequently changed first: interpreter, packages, kvferry. It has no shell. An
image for GPUs also has CUDA's libraries and the C compiler with which Triton builds its launchers.
"""

import compileall
import hashlib
import os
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from harness.kube import c_compiler
from harness.kube.host_image import ACCOUNTS
from harness.kube.image import Entry, Image, tree, write_archive
from kvferry.bench.commit import ROOT
from kvferry.core.errors import Unavailable

Say = Callable[[str], None]

EXTRAS = ("serve", "bench", "encryption", "nixl", "operator", "state", "traces")
_SITE = f"app/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
_GPU = re.compile(r"nvidia-|cuda-|triton$")
"""Pattern of packages of which an image for CPUs has only the libraries that other packages link to; torch does not
load without these."""
_UNWANTED = ("__pycache__", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3")
_UNWANTED_STANDARD = shutil.ignore_patterns(*_UNWANTED, "config-*", "site-packages", "dist-packages", "*.a")
_COMMAND = b"#!/app/bin/python\nimport sys\n\nfrom kvferry.cli.entry import main\n\nsys.exit(main())\n"
_SECONDS = 1200.0


def write(out: Path, scratch: Path, name: str, say: Say = print, *, cuda: bool = False) -> str:
    """Write the archive and return the digest of its manifest.

    Args:
        scratch: folder for staged files; staged packages are reused by the next build.
        cuda: whether workers of the image compute on GPUs too; it is several gigabytes larger.

    Raises:
        Unavailable: a package is not installed, the wheel cannot be built, or an image for GPUs has no C compiler.
    """
    wanted = closure("kvferry", EXTRAS)
    own = wanted.pop(canonicalize_name("kvferry"))
    wanted |= closure("pip", ())  # `kvferry model` fetches models from PyPI
    kept = [found for key, found in sorted(wanted.items()) if cuda or not _GPU.match(key)]
    packages, libraries = _stage_packages(scratch, kept, say)
    say("staging the interpreter")
    base = _fresh(scratch / "base")
    _stage_interpreter(base, libraries)
    if cuda:
        say("staging the C compiler")
        _stage_launcher_tools(base)
    say("building the wheel of kvferry")
    application = _fresh(scratch / "application")
    _stage_application(application, _wheel(scratch))
    path = "/app/bin:/usr/local/bin" + (":/usr/bin" if cuda else "")
    environment = {"PATH": path, "HOME": "/tmp", "PYTHONSAFEPATH": "1"}
    environment |= {"SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt"}
    labels = {"org.opencontainers.image.title": "kvferry", "org.opencontainers.image.version": own.version}
    image = Image(name, ["/app/bin/kvferry"], environment, labels=labels)
    say("writing the archive")
    return write_archive(out, image, [_base_entries(base), tree(packages), tree(application)])


def closure(name: str, extras: Iterable[str]) -> dict[str, metadata.Distribution]:
    """Return a distribution of this environment together with all its dependencies, by canonical name.

    Raises:
        Unavailable: a dependency is not installed.
    """
    found: dict[str, metadata.Distribution] = {}
    visited: set[tuple[str, str]] = set()
    waiting = [(canonicalize_name(name), ("", *extras))]
    while waiting:
        key, wanted = waiting.pop()
        try:
            distribution = found.setdefault(key, metadata.distribution(key))
        except metadata.PackageNotFoundError:
            raise Unavailable(f"{key} is required but not installed; run `make setup`") from None
        for extra in wanted:
            if (key, extra) in visited:
                continue
            visited.add((key, extra))
            for line in distribution.requires or ():
                need = Requirement(line)
                if need.marker is None or need.marker.evaluate({"extra": extra}):
                    waiting.append((canonicalize_name(need.name), ("", *need.extras)))
    return found


def linked(files: Iterable[Path]) -> set[Path]:
    """Return all shared libraries that the dynamic loader resolves for these files."""
    listed = [str(file) for file in files]
    found: set[Path] = set()
    for start in range(0, len(listed), 200):
        part = listed[start : start + 200]
        done = subprocess.run(["ldd", *part], capture_output=True, text=True, timeout=_SECONDS, check=False)
        found |= {
            Path(os.path.normpath(one)) for one in re.findall(r"(?:=> |^\s+)(/\S+) \(0x", done.stdout, re.MULTILINE)
        }
    return found


def _stage_packages(scratch: Path, kept: list[metadata.Distribution], say: Say) -> tuple[Path, set[Path]]:
    """Stage the packages; return their folder and the external libraries to which they link."""
    site = Path(sysconfig.get_path("purelib"))
    names = "\n".join(f"{one.name}=={one.version}" for one in kept)
    folder = scratch / f"packages-{hashlib.sha256(names.encode()).hexdigest()[:12]}"
    files = [path for one in kept for path in _files(one, site)]
    libraries = linked(path for path in files if re.search(r"\.so(\.|$)", path.name))
    inside = {path for path in libraries if path.is_relative_to(site)}
    if not folder.exists():
        say(f"staging {len(kept)} packages")
        fresh = _fresh(scratch / "packages-new")
        for path in sorted({*files, *inside}):
            _link(path, fresh / _SITE / path.relative_to(site))
        _compile(fresh)
        os.replace(fresh, folder)
    return folder, libraries - inside


def _files(distribution: metadata.Distribution, site: Path) -> list[Path]:
    listed = (Path(os.path.normpath(str(distribution.locate_file(one)))) for one in distribution.files or ())
    return [path for path in listed if path.is_relative_to(site) and path.suffix != ".pyc" and path.is_file()]


def _stage_interpreter(root: Path, libraries: set[Path]) -> None:
    """Stage the interpreter at /usr/local; it locates its library relative to its own path."""
    program = Path(sys.executable).resolve()
    standard = Path(sysconfig.get_path("stdlib"))
    at = root / "usr" / "local"
    shutil.copytree(standard, at / "lib" / standard.name, symlinks=True, ignore=_UNWANTED_STANDARD)
    (at / "bin").mkdir()
    shutil.copy2(program, at / "bin" / program.name)
    needed = libraries | linked([program, *standard.rglob("*.so")])
    for library in sorted(needed):
        usual = library.parts[1] in ("lib", "lib64", "usr") and "local" not in library.parts
        target = root / (str(library).lstrip("/") if usual else f"usr/lib/{library.name}")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, target)  # copy the target of a link under the link's name
    _compile(root)


def _stage_launcher_tools(root: Path) -> None:
    """Stage the requirements of Triton for building and loading its launchers: a C compiler, Python's headers, and
    ldconfig, by which it finds the driver's library.
    """
    c_compiler.stage(root, linked)
    headers = Path(sysconfig.get_path("include"))
    shutil.copytree(headers, root / "usr" / "local" / "include" / headers.name)
    finder = Path("/sbin/ldconfig")
    if finder.is_file():
        (root / "sbin").mkdir(exist_ok=True)
        shutil.copy2(finder, root / "sbin" / finder.name)
        # The cache of ldconfig, which a container runtime updates when it adds the GPU driver. Writing it needs root.
        (root / "etc").mkdir(exist_ok=True)
        subprocess.run([finder, "-r", root], capture_output=True, timeout=_SECONDS, check=False)


def _base_entries(root: Path) -> list[Entry]:
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    made = [Entry(name) for name in ("dev", "etc", "etc/ssl", "etc/ssl/certs", "proc", "run", "sys")]
    made += [Entry("tmp", 0o1777)]
    made += [Entry(name, 0o644, data=text.encode()) for name, text in ACCOUNTS.items()]
    if certificates.is_file():
        made.append(Entry(str(certificates).lstrip("/"), 0o644, source=certificates))
    return made + tree(root)


def _stage_application(root: Path, wheel: Path) -> None:
    """Create a virtual environment manually, from pyvenv.cfg and a link to the interpreter."""
    site = root / _SITE
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    program = Path(sys.executable).resolve().name
    (root / "app" / "pyvenv.cfg").write_text("home = /usr/local/bin\ninclude-system-site-packages = false\n")
    commands = root / "app" / "bin"
    commands.mkdir()
    (commands / "python").symlink_to(f"/usr/local/bin/{program}")
    (commands / "python3").symlink_to("python")
    (commands / "kvferry").write_bytes(_COMMAND)
    (commands / "kvferry").chmod(0o755)
    _compile(root)


def _wheel(scratch: Path) -> Path:
    folder = _fresh(scratch / "wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        raise Unavailable(f"cannot build kvferry's wheel: {done.stderr.strip()[-2000:]}")
    return next(folder.glob("*.whl"))


def _compile(root: Path) -> None:
    """Compile to unchecked bytecode, since the root file system is read-only and all times in layers are 0."""
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(
        root, maxlevels=40, quiet=2, stripdir=str(root), prependdir="/", workers=0, invalidation_mode=mode
    )


def _link(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path.resolve(), target)
    except OSError:  # a different file system
        shutil.copy2(path, target)


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
