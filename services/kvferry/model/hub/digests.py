"""Verifies downloaded files against the digests of the hub, once for each file.

huggingface_hub compares only the size of what it downloads. It names each file in its cache by the digest that the hub
gave: SHA-256 for large files, and git's SHA-1 for the others. So a file can be verified without the hub, too, and files
that other programs have fetched are verified as well.
"""

import hashlib
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_CHUNK_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def name_digest(path: Path) -> str:
    """Return the digest in the name of a file of the shared cache; empty if there is none, because the cache has no
    links."""
    try:
        found = os.path.basename(os.readlink(path))
    except OSError:
        return ""
    return checked_digest(found)


def checked_digest(text: str) -> str:
    """Return a digest, or an empty text if it is none: 64 or 40 hex digits in lower case."""
    return text if _DIGEST.fullmatch(text) else ""


class VerifiedFiles:
    """Which files have been verified: a small file each, named by the digest, with size, time and inode of the file at
    that time. A changed file is verified again; so are all files if this folder cannot be written."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: folder of the marks, created when needed.
        """
        self._folder = folder

    def holds(self, path: Path, digest: str, progress: Callable[[int], None]) -> bool:
        """Return whether a file has the content of a digest; read it unless this is known.

        Args:
            path: the file.
            digest: SHA-256, 64 hex digits, or git's SHA-1 of a file, 40 hex digits.
            progress: called with the number of bytes of each chunk read.

        Raises:
            OSError: the file cannot be read.
        """
        state = os.stat(path)
        mark, text = self._folder / digest, f"{state.st_size} {state.st_mtime_ns} {state.st_ino}"
        with suppress(OSError, ValueError):
            if mark.read_text("ascii") == text:
                return True
        if content_digest(path, is_sha256=len(digest) == 64, progress=progress) != digest:
            return False
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            fresh = self._folder / f"{digest}.{os.getpid()}"
            fresh.write_text(text, "ascii")
            os.replace(fresh, mark)
        return True


def content_digest(path: Path, *, is_sha256: bool, progress: Callable[[int], None] = lambda _: None) -> str:
    """Return the SHA-256 of a file's content, or git's SHA-1 of a file, hexadecimal."""
    with path.open("rb") as source:
        made = hashlib.sha256() if is_sha256 else hashlib.sha1(usedforsecurity=False)
        if not is_sha256:
            made.update(b"blob %d\0" % os.fstat(source.fileno()).st_size)
        while chunk := source.read(_CHUNK_BYTES):
            made.update(chunk)
            progress(len(chunk))
    return made.hexdigest()


def discard(path: Path) -> None:
    """Remove a file of the shared cache, and what it links to."""
    with suppress(OSError):
        blob = path.parent / os.readlink(path)
        blob.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
