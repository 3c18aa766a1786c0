"""Provides a model of the Hugging Face Hub: from the shared cache, or by download.

    <HF_HUB_CACHE>/models--ORG--NAME/     as huggingface_hub lays it out, shared with other programs
        refs/<revision>                   commit of a revision; written here when all files have been verified
        snapshots/<commit>/<file>         links to the content
    <cache>/verified/<digest>             which files have been verified

A name at a commit needs no request if its files are in the cache. Any other name is resolved at the hub; if the hub
does not answer, the commit that it had before is used, with a warning. Where the hub is, its token, and the folder of
the cache are the business of huggingface_hub and its environment variables.
"""

import difflib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.errors import KvferryError, ModelFileError
from kvferry.core.process.config import cache_dir, silence_hub_telemetry
from kvferry.model.fetch import Progress
from kvferry.model.hub.digests import VerifiedFiles, checked_digest, discard, name_digest
from kvferry.model.hub.failures import explained, hide_queries, is_missing, is_unreachable
from kvferry.model.hub.files import (
    CONFIG,
    INDEX,
    RepoFile,
    checked_files,
    gguf_files,
    is_gguf,
    small_files,
    weight_files,
)
from kvferry.model.hub.names import SCHEME, HubName, is_commit, is_repo, parse_hub_name
from kvferry.model.hub.transfer import LIBRARY, Transfer, download, remove_leftovers
from kvferry.weights.checkpoints.safetensors_dir import read_json
from kvferry.weights.families.registry import family_of
from kvferry.weights.files.regular_file import read_file

_log = logging.getLogger(__name__)
_DEFAULT_REVISION = "main"
_ANSWER_SECONDS = 10.0
"""Time limit of the hub for each part of an answer."""
_SUGGEST_SECONDS = 5.0
_LEFTOVER_SECONDS = 3600.0
"""Time without a byte after which an incomplete file that no process has locked is removed."""
_MAX_SUGGESTED = 3
_MAX_SEARCHED = 50
_GIB, _MIB = 1 << 30, 1 << 20


def _free_bytes(folder: Path) -> int:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


@dataclass(frozen=True, slots=True)
class HubAccess:
    """Where models come from and go to."""

    endpoint: str = ""
    """URL of the hub; empty for that of huggingface_hub (`HF_ENDPOINT`)."""
    cache: Path | None = None
    """Folder of the shared cache; `None` for that of huggingface_hub (`HF_HUB_CACHE`, `HF_HOME`)."""
    free_bytes: Callable[[Path], int] = field(default=_free_bytes, compare=False)
    """Returns the free bytes of the disk of a folder, which may not exist yet."""
    clock: Clock = field(default_factory=SystemClock, compare=False)


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model in the shared cache, verified."""

    name: HubName
    """Its name at the commit."""
    path: Path
    """Folder with safetensors, or the first GGUF file."""


def hub_name(spec: str) -> HubName | None:
    """Return the name of a model on the hub, or `None` if `spec` is something else: a local file or folder of this name
    comes first, unless `spec` begins with `hf://`.

    Raises:
        UsageError: the name is invalid.
    """
    if not spec.startswith(SCHEME):
        with suppress(OSError, ValueError):  # a name that no file can have
            if Path(spec).exists():
                return None
    return parse_hub_name(spec)


def pinned_model(spec: str, progress: Progress | None = None) -> str:
    """Fetch a model of the hub, and return its name at the commit, with which other processes open the same files
    without a request; return any other name or path unchanged.

    Raises:
        KvferryError: see `fetch_hub_model`.
    """
    name = hub_name(spec)
    return spec if name is None else str(fetch_hub_model(name, progress=progress).name)


def fetch_hub_model(name: HubName, *, progress: Progress | None = None, access: HubAccess | None = None) -> HubModel:
    """Return a model in the shared cache; download the files that are missing.

    Args:
        name: name of the model.
        progress: progress callback; `None` for no reports.
        access: where the model comes from; `None` for the settings of huggingface_hub.

    Raises:
        UnknownModel: there is no such repository, revision or quantization.
        Unavailable: the hub cannot be reached, and the model is not in the cache.
        ModelFileError: the model is gated, has no files that can be served, does not fit on the disk, or a file does
            not have the digest that the hub gives.
    """
    silence_hub_telemetry()
    hide_queries()
    fetched = _Fetch(name, access or HubAccess(), progress or (lambda *_: None)).run()
    _log.info("model %s: commit %s, in %s", name.served, fetched.name.revision, fetched.path)
    return fetched


class _Fetch:
    def __init__(self, name: HubName, access: HubAccess, progress: Progress) -> None:
        from huggingface_hub import constants  # takes a tenth of a second, so that only models of the hub import it

        self._name = name
        self._progress = progress
        self._free_bytes = access.free_bytes
        self._clock = access.clock
        self._endpoint = access.endpoint or constants.ENDPOINT
        self._cache = access.cache or Path(constants.HF_HUB_CACHE)
        self._folder = self._cache / f"models--{name.repo.replace('/', '--')}"
        self._verified = VerifiedFiles(cache_dir() / "verified")
        self._is_offline = constants.is_offline_mode()

    def run(self) -> HubModel:
        name = self._name
        if name.is_pinned or self._is_offline:
            found = self._cached()
            if found is not None:
                return found
        if self._is_offline:
            raise ModelFileError(
                f"model {name.served!r} is not in the cache {self._cache}{_at(name)}, and HF_HUB_OFFLINE is set; run "
                f"`kvferry pull {name.given}` without it, or set HF_HUB_CACHE to the folder that has the model",
                field="model",
            )
        try:
            commit, files = self._listing()
        except Exception as error:
            found = self._cached() if is_unreachable(error) else None
            if found is not None:
                _log.warning("the hub does not answer; %s is served at commit %s", name.served, found.name.revision)
                return found
            raise explained(error, name, self._endpoint, self._similar() if is_missing(error) else ()) from error
        path = self._fetched(commit, files)
        if not name.is_pinned:
            self._write_ref(commit)
        return HubModel(name.pinned(commit), path)

    def _listing(self) -> tuple[str, dict[str, RepoFile]]:
        """Ask the hub for the commit of the revision, and for its files."""
        from huggingface_hub import HfApi

        info = HfApi(endpoint=self._endpoint, library_name=LIBRARY, library_version=version(LIBRARY)).model_info(
            self._name.repo, revision=self._name.revision or None, timeout=_ANSWER_SECONDS, files_metadata=True
        )
        commit = info.sha or ""
        if not is_commit(commit):
            raise ModelFileError(
                f"model {self._name.served!r}: the hub gives no commit; check HF_ENDPOINT, which must be a hub",
                field="model",
            )
        files = [
            RepoFile(
                str(one.rfilename),
                one.size if isinstance(one.size, int) else -1,
                checked_digest(str(one.lfs.sha256 if one.lfs else one.blob_id)),
            )
            for one in info.siblings or ()
        ]
        return commit, checked_files(self._name, files)

    def _fetched(self, commit: str, files: Mapping[str, RepoFile]) -> Path:
        """Download what is missing, verify it, and return the path of the model."""
        snapshot = self._folder / "snapshots" / commit
        if is_gguf(self._name, files):
            chosen = gguf_files(self._name, files)
            self._download(commit, chosen)
            return snapshot / chosen[0].path
        small = small_files(self._name, files)
        self._download(commit, small, is_shown=False)
        family_of(read_json(snapshot / CONFIG), snapshot / CONFIG)  # refuse a model before its weights are downloaded
        index = read_file(snapshot / INDEX) if INDEX in files else None
        self._download(commit, weight_files(self._name, files, index))
        return snapshot

    def _download(self, commit: str, files: Sequence[RepoFile], *, is_shown: bool = True) -> None:
        """Download those of the files that are missing; verify all of them.

        Raises:
            KvferryError: see `fetch_hub_model`.
        """
        snapshot = self._folder / "snapshots" / commit
        missing = [file for file in files if not (snapshot / file.path).exists()]
        total = sum(file.size for file in missing)
        if missing:
            remove_leftovers(self._folder, self._clock.wall() - _LEFTOVER_SECONDS)
            self._check_space(total)
            stage = f"download {_size(total)}"
            report = self._progress if is_shown else (lambda *_: None)
            _log.info("model %s: fetching %s in %d files", self._name.served, _size(total), len(missing))
            report(stage, 0, total)
            transfer = Transfer(lambda done: report(stage, max(0, min(done, total - 1)), total))
            try:
                download(
                    missing, transfer, repo=self._name.repo, commit=commit, cache=self._cache, endpoint=self._endpoint
                )
            except Exception as error:
                raise explained(error, self._name, self._endpoint, is_listed=True) from error
            report(stage, total, total)
        self._verify(snapshot, files, is_shown=is_shown)

    def _verify(self, snapshot: Path, files: Sequence[RepoFile], *, is_shown: bool = True) -> None:
        """Compare files with their digests, those that have not been compared yet. A file with another content is
        removed from the cache.

        Args:
            snapshot: folder of the files.
            files: the files; without a digest, that in the name of the content is used.
            is_shown: whether the progress is reported.

        Raises:
            ModelFileError: a file has another content, or cannot be read.
        """
        report = self._progress if is_shown else (lambda *_: None)
        total = sum(os.path.getsize(place) for file in files if (place := snapshot / file.path).exists())
        stage, done = f"verify {_size(total)}", 0

        def count(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            report(stage, min(done, total - 1), total)

        for file in files:
            self._verify_one(snapshot / file.path, file.digest, count)
        if done:
            report(stage, total, total)

    def _verify_one(self, place: Path, digest: str, count: Callable[[int], None]) -> None:
        what, again = f"model {self._name.served!r}", f"`kvferry pull {self._name.given}`"
        digest = digest or name_digest(place)
        try:
            if not digest:
                _log.warning("%s is not verified: the hub gives no digest, or the cache has no links", place)
                return
            if self._verified.holds(place, digest, count):
                return
            discard(place)
        except OSError as error:
            raise ModelFileError(
                f"{what}: {place} cannot be read ({error.strerror}); remove {self._folder}, and run {again}",
                field="model",
            ) from error
        raise ModelFileError(
            f"{what}: {place.name} does not have the digest {digest} that the hub gives; it was removed from the "
            f"cache. Run {again}, or check HF_ENDPOINT",
            field="model",
        )

    def _check_space(self, needed: int) -> None:
        try:
            free = self._free_bytes(self._cache)
        except OSError:
            return  # the download will say why
        if needed > free:
            raise ModelFileError(
                f"model {self._name.served!r} needs {_size(needed)} in {self._cache}, where {_size(free)} are free; "
                "free space, or set HF_HUB_CACHE to a folder on another disk",
                field="model",
            )

    def _cached(self) -> HubModel | None:
        """Return the model if all of its files are in the cache; no request.

        Raises:
            ModelFileError: a file has another content than its name in the cache says.
        """
        commit = self._name.revision if self._name.is_pinned else self._read_ref()
        snapshot = self._folder / "snapshots" / commit
        if not is_commit(commit) or not snapshot.is_dir():
            return None
        try:
            files = checked_files(self._name, _files_in(snapshot))
            if is_gguf(self._name, files):
                chosen = gguf_files(self._name, files)
                path = snapshot / chosen[0].path
            else:
                index = read_file(snapshot / INDEX) if INDEX in files else None
                chosen = [*small_files(self._name, files), *weight_files(self._name, files, index)]
                path = snapshot
        except KvferryError:  # a file is missing
            return None
        self._verify(snapshot, chosen)
        return HubModel(self._name.pinned(commit), path)

    @property
    def _ref(self) -> Path:
        return self._folder / "refs" / (self._name.revision or _DEFAULT_REVISION)

    def _read_ref(self) -> str:
        try:
            with self._ref.open("r", encoding="ascii") as file:
                return file.read(64).strip()
        except (OSError, ValueError):
            return ""

    def _write_ref(self, commit: str) -> None:
        """Record the commit of the revision, for use without the hub. A cache that cannot be written is left as is."""
        if self._read_ref() == commit:
            return
        with suppress(OSError):
            self._ref.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._ref.parent, delete=False, encoding="ascii") as file:
                file.write(commit)
            os.replace(file.name, self._ref)

    def _similar(self) -> list[str]:
        """Return names of existing models that are like the name, best first; empty if the hub does not answer."""
        org, _, model = self._name.repo.partition("/")
        try:
            found = [*self._search({"search": model}), *self._search({"author": org})]
        except Exception as error:
            _log.debug("no names like %s: %s", self._name.repo, type(error).__name__)
            return []
        return difflib.get_close_matches(self._name.repo, dict.fromkeys(found), n=_MAX_SUGGESTED, cutoff=0.7)

    def _search(self, query: Mapping[str, str]) -> list[str]:
        from huggingface_hub import get_session

        answer = get_session().get(
            f"{self._endpoint}/api/models",
            params={**query, "limit": _MAX_SEARCHED},
            timeout=_SUGGEST_SECONDS,
        )
        answer.raise_for_status()
        return [str(one["id"]) for one in answer.json()[:_MAX_SEARCHED] if is_repo(str(one["id"]))]


def _files_in(snapshot: Path) -> list[RepoFile]:
    """Return the files of a snapshot that have content."""
    return [
        RepoFile(path.relative_to(snapshot).as_posix(), path.stat().st_size)
        for path in sorted(snapshot.rglob("*"))
        if path.is_file()
    ]


def _at(name: HubName) -> str:
    return f" at revision {name.revision!r}" if name.revision else ""


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / _MIB:.1f} MiB"
