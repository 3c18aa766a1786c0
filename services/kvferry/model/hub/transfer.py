"""Downloads files of a repository into the shared cache by huggingface_hub, several at a time."""

import fcntl
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvferry.model.hub.failures import TooMuchSent, TransferStopped
from kvferry.model.hub.files import RepoFile

LIBRARY = "kvferry"
"""Name of this program in requests to the hub, sent with its version."""
_MAX_FILES_AT_ONCE = 4
_SLACK_BYTES = 64 << 20
"""A file may be sent so much longer than announced before its transfer is ended; its size is checked at the end."""


class Transfer:
    """Counts the bytes of a download, and ends it."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        """
        Args:
            progress: called with the number of bytes so far.
        """
        self._progress = progress
        self._lock = threading.Lock()
        self._done = 0
        self.is_stopped = False
        """Whether all transfers end at their next chunk."""

    def add(self, count: int) -> None:
        """Count bytes; a negative number if a file is begun again.

        Raises:
            TransferStopped: another transfer has failed.
        """
        if self.is_stopped:
            raise TransferStopped
        with self._lock:
            self._done += count
            self._progress(self._done)


class _Bar:
    """What huggingface_hub calls of a progress bar: counts the bytes of one file, and limits them."""

    transfer: Transfer
    size: int

    def __init__(self, **_: Any) -> None:
        self.n = 0
        self.total = self.size

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, count: float | None = 1) -> None:
        self.n += int(count or 0)
        if self.n > self.size + _SLACK_BYTES:
            raise TooMuchSent(f"the server sent more than the {self.size} bytes that the hub announced for a file")
        self.transfer.add(int(count or 0))

    def update_transfer(self, count: float | None = 1) -> None:
        """Bytes of the network, which may be fewer than those written; not counted."""

    def set_postfix_str(self, *_: Any, **__: Any) -> None:
        pass

    set_transfer_postfix_str = set_description_str = refresh = close = set_postfix_str


def download(
    files: Sequence[RepoFile],
    transfer: Transfer,
    *,
    repo: str,
    commit: str,
    cache: Path,
    endpoint: str,
) -> None:
    """Download files into the shared cache. After a cut, huggingface_hub resumes a file where it ended; after several
    cuts without a byte it gives up.

    Args:
        files: files to download.
        transfer: counts the bytes.
        repo: `ORG/NAME`.
        commit: commit of the repository.
        cache: folder of the shared cache.
        endpoint: URL of the hub.

    Raises:
        Exception: whatever huggingface_hub raises; see `failures.explained`.
    """
    one = functools.partial(_download_one, transfer, repo, commit, cache, endpoint)
    with ThreadPoolExecutor(_MAX_FILES_AT_ONCE, thread_name_prefix="download") as pool:
        try:
            for done in as_completed([pool.submit(one, file) for file in files]):
                done.result()
        except BaseException:  # also Ctrl-C
            transfer.is_stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def remove_leftovers(repo_folder: Path, before: float) -> None:
    """Remove files that killed downloads have left in a repository's folder of the shared cache: those that have not
    been written since `before`, and that no process has locked.

    Args:
        repo_folder: `models--ORG--NAME` in the cache.
        before: seconds since the epoch.
    """
    for path in (repo_folder / "blobs").glob("*.incomplete"):
        lock = repo_folder.parent / ".locks" / repo_folder.name / f"{path.name.partition('.')[0]}.lock"
        with suppress(OSError):  # a lock of another process, or a cache that cannot be written
            if path.stat().st_mtime < before:
                with lock.open("a") as handle:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


def _download_one(transfer: Transfer, repo: str, commit: str, cache: Path, endpoint: str, file: RepoFile) -> None:
    from huggingface_hub import hf_hub_download

    bar: Any = type("FileBar", (_Bar,), {"transfer": transfer, "size": file.size})
    hf_hub_download(
        repo,
        file.path,
        revision=commit,
        cache_dir=cache,
        endpoint=endpoint,
        library_name=LIBRARY,
        library_version=version(LIBRARY),
        tqdm_class=bar,
    )
