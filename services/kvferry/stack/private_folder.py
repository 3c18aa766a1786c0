"""Temporary folders for private keys, which are removed even after a process was killed.

A folder is locked while its process runs; the kernel releases the lock when the process ends. The next process that
creates a folder with the same prefix removes the folders whose lock is free.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_LOCK = "lock"


class PrivateFolder:
    """A folder in the temporary folder that only this user can read, for as long as this process runs."""

    def __init__(self, prefix: str) -> None:
        """
        Args:
            prefix: first part of the folder's name. Folders of ended processes with this prefix are removed.
        """
        _remove_unlocked(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock: int | None = os.open(self.path / _LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove the folder and its content. Idempotent."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _remove_unlocked(prefix: str) -> None:
    """Remove this user's folders whose process has ended. A folder without a lock file is kept: its process may be
    about to create it, and it holds no keys yet."""
    for folder in Path(tempfile.gettempdir()).glob(prefix + "*"):
        try:
            if folder.lstat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # its process is running
        finally:
            os.close(lock)
