"""Disk tier: one file per storage object in a folder of bounded size, which workers on one host can share.

    disk:///FOLDER?size=20GiB&direct=auto&sync=off&encrypt=off

    FOLDER/ab/cd/abcd...      the object with that name; it remains available after a restart

A file appears atomically, by rename, and never changes. There is no index and no lock on disk: the index in memory is
rebuilt from file names and modification times. Workers share times of use through the files' modification times. For
names that are not in the index, the file system is checked; a file removed by a different worker is a miss. Files are
not synced by default: after a power loss some may be damaged, which the frame's digest detects. A damaged file is
removed.
"""

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvferry.core.clock import Clock
from kvferry.core.errors import UsageError
from kvferry.core.ids import BlockHash
from kvferry.core.rare_lines import RareLines, more
from kvferry.core.settings.parsers import boolean, size_bytes
from kvferry.kv.tiers.disk.disk_probe import direct_is_better
from kvferry.kv.tiers.disk.object_file import TEMPORARY, Reading, aligned_buffer, file_bytes, sweep, write_object
from kvferry.kv.tiers.interface.frame import FrameDamaged, Frames, flat
from kvferry.kv.tiers.interface.spec import TierSpec
from kvferry.kv.tiers.interface.tier import ObjectKey, Presence, TierError, TierMiss
from kvferry.kv.tiers.policy.disk_index import DiskEntry, DiskIndex

_log = logging.getLogger(__name__)

_TOUCH_SECONDS = 60.0
"""Minimum interval in seconds between updates of a file's modification time; without it, every read would also be a
write."""
_MAX_FILES = 1 << 20
_RESCAN_SHARE = 8
"""Divisor: the folder is rescanned after writing 1/8 of its size, to find files of other workers."""
_MAX_BOUNCES = 4


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """Options of one disk tier."""

    text: str
    folder: Path
    max_bytes: int
    direct: str = "auto"
    sync: bool = False
    encrypt: bool = False


class DiskTier:
    """`Tier` of object files in one folder."""

    name = "disk"

    def __init__(self, options: DiskOptions, frames: Frames, clock: Clock, *, direct: bool) -> None:
        """
        Args:
            options: options of the tier's URL.
            frames: reads and writes the headers of objects.
            clock: clock of deadlines.
            direct: whether to bypass the page cache; `options.direct` is resolved by the caller.
        """
        self._options = options
        self._frames = frames
        self._clock = clock
        self._is_direct = direct
        self._file_bytes = file_bytes(frames.object_bytes)
        self._index = DiskIndex(options.max_bytes)
        self._storing: set[BlockHash] = set()
        self._unscanned: dict[BlockHash, DiskEntry] = {}
        """Objects stored since the start of the last scan, which may have missed their files."""
        self._bounces: list[memoryview] = []
        """Idle aligned buffers; at most `_MAX_BOUNCES`."""
        self._lock = threading.Lock()  # guards the four fields above and `_lines`; not held during file accesses
        self._lines = RareLines(clock)
        self._scanning = threading.Lock()  # held by the thread that scans the folder

    # ------------------------------------------------------------------ Tier

    def lookup(self, keys: Sequence[ObjectKey], timeout: float) -> list[Presence]:
        deadline = self._clock.monotonic() + timeout
        with self._lock:
            known = [k.name in self._index for k in keys]
            coming = [k.name in self._storing for k in keys]
        answers = []
        for key, is_known, is_coming in zip(keys, known, coming, strict=True):
            if not is_known and self._clock.monotonic() <= deadline:
                is_known = self._is_there(key.name)
            answers.append(Presence.YES if is_known else Presence.NOT_YET if is_coming else Presence.NO)
        return answers

    def load(self, key: ObjectKey, into: Sequence[memoryview], timeout: float) -> None:
        deadline = self._clock.monotonic() + timeout
        views = flat(into, self._frames.object_bytes)
        bounce = self._take_bounce() if self._is_direct else None
        reading: Reading | None = None
        try:
            reading = Reading(self._path(key.name), direct=self._is_direct)
            reading.read(
                views,
                self._frames.object_bytes,
                lambda header: self._frames.open(header, key),
                deadline,
                self._clock,
                bounce,
            )
            wall = self._clock.wall()
            with self._lock:
                is_due = self._index.use(key.name, wall, _TOUCH_SECONDS)
            if is_due:
                reading.touch(wall)
        except FileNotFoundError as error:
            self._forget(key.name)
            raise TierMiss(f"tier {self._options.text}: object not found") from error
        except FrameDamaged as error:
            self._discard(key.name, str(error))
            raise FrameDamaged(f"tier {self._options.text}: {error}") from error
        except TierError as error:
            raise TierError(f"tier {self._options.text}: {error}") from error
        except OSError as error:
            if reading is not None:  # the file exists but cannot be read, for example on a failing disk
                self._discard(key.name, error.strerror or type(error).__name__)
            raise self._failed("read", error) from error
        finally:
            if reading is not None:
                reading.close()
            if bounce is not None:
                self._return_bounce(bounce)

    def store(self, key: ObjectKey, parts: Sequence[memoryview], timeout: float) -> bool:
        deadline = self._clock.monotonic() + timeout
        views = flat(parts, self._frames.object_bytes)
        if self._file_bytes > self._options.max_bytes or self._is_there(key.name):
            return False
        with self._lock:
            if key.name in self._storing:
                return False
            self._storing.add(key.name)
        try:
            self._make_room()
            header, pages = self._frames.frame(key, views)
            path = self._path(key.name)
            self._make_folder(path.parent)
            write_object(
                path.parent,
                path.name,
                header,
                pages,
                self._frames.object_bytes,
                direct=self._is_direct,
                sync=self._options.sync,
                deadline=deadline,
                clock=self._clock,
            )
            with self._lock:
                entry = DiskEntry(self._file_bytes, self._clock.wall())
                self._index.add(key.name, entry)
                self._unscanned[key.name] = entry
        except OSError as error:
            raise self._failed("write", error) from error
        except TierError as error:
            raise TierError(f"tier {self._options.text}: {error}") from error
        finally:
            with self._lock:
                self._storing.discard(key.name)
        return True

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return self._index.num_bytes

    def close(self) -> None:
        """Do nothing, since no file is open between calls."""

    # ------------------------------------------------------------------ folder

    def scan(self) -> None:
        """Rebuild the index from the folder, and remove temporary files whose writer has exited.

        Raises:
            OSError: the folder cannot be read.
        """
        found: dict[BlockHash, DiskEntry] = {}
        with self._lock:
            self._unscanned = {}
        for entry in _files(self._options.folder):
            if entry.name.startswith(TEMPORARY):
                sweep(Path(entry.path))
                continue
            with suppress(OSError, ValueError):
                name = BlockHash(bytes.fromhex(entry.name))
                if len(name) != 32 or self._path(name) != Path(entry.path):
                    continue
                status = entry.stat(follow_symlinks=False)
                if len(found) == _MAX_FILES:
                    os.unlink(entry.path)  # removed instead of indexed, to bound the memory of the index
                    continue
                found[name] = DiskEntry(status.st_size, status.st_mtime)
        with self._lock:
            found.update((name, entry) for name, entry in self._unscanned.items() if name in self._index)
            self._index.rebuild(list(found.items()))
            gone = self._index.make_room(0)
        self._remove(gone)

    def _make_room(self) -> None:
        with self._lock:
            is_due = len(self._unscanned) * self._file_bytes * _RESCAN_SHARE > self._options.max_bytes
        if is_due and self._scanning.acquire(blocking=False):
            try:
                self.scan()
            finally:
                self._scanning.release()
        with self._lock:
            # Make space for all running stores, since concurrent stores would otherwise exceed the size.
            gone = self._index.make_room(self._file_bytes * len(self._storing))
        self._remove(gone)

    def _remove(self, names: Sequence[BlockHash]) -> None:
        for name in names:
            with suppress(OSError):  # a different worker may have removed it
                self._path(name).unlink()

    def _is_there(self, name: BlockHash) -> bool:
        """Check whether the file exists; add it to the index or remove it accordingly."""
        try:
            status = os.stat(self._path(name), follow_symlinks=False)
        except OSError:
            self._forget(name)
            return False
        with self._lock:
            if name not in self._index:
                self._index.add(name, DiskEntry(status.st_size, status.st_mtime))
        return True

    def _discard(self, name: BlockHash, why: str) -> None:
        """Remove a damaged file, since it would prevent a later store under its name."""
        self._forget(name)
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as error:  # for example a directory
            what = f"{self._path(name)} is damaged and cannot be removed ({error.strerror}); remove it"
            kind = "kept"
        else:
            what, kind = f"removed a damaged file ({why})", why
        with self._lock:
            left_out = self._lines.left_out(kind)
        if left_out is not None:
            _log.warning("tier %s: %s%s", self._options.text, what, more(left_out))

    def _forget(self, name: BlockHash) -> None:
        with self._lock:
            self._index.drop(name)

    def _path(self, name: BlockHash) -> Path:
        text = name.hex()
        return self._options.folder / text[:2] / text[2:4] / text

    def _make_folder(self, folder: Path) -> None:
        """Create the two levels of subfolders for an object. The tier's own folder is never re-created: if its volume
        was unmounted, objects must not fill the disk under the mount point.
        """
        for part in (folder.parent, folder):
            with suppress(FileExistsError):
                part.mkdir(mode=0o700)

    def _failed(self, what: str, error: OSError) -> TierError:
        remedies = {
            errno.ENOSPC: "; free space, or lower size=",
            errno.EROFS: "; remount it writable",
            errno.ENOENT: "; its folder is missing: create it again",
        }
        text = error.strerror or type(error).__name__
        return TierError(f"tier {self._options.text}: cannot {what} ({text}){remedies.get(error.errno or 0, '')}")

    def _take_bounce(self) -> memoryview:
        with self._lock:
            if self._bounces:
                return self._bounces.pop()
        return aligned_buffer(self._frames.object_bytes)

    def _return_bounce(self, bounce: memoryview) -> None:
        with self._lock:
            if len(self._bounces) < _MAX_BOUNCES:
                self._bounces.append(bounce)


def _files(folder: Path) -> Iterator[os.DirEntry[str]]:
    """List temporary files in the folder itself and all files two levels deep; skip files that are removed during the
    scan."""
    yield from (entry for entry in _entries(folder, os.DirEntry.is_file) if entry.name.startswith(TEMPORARY))
    for first in _entries(folder, os.DirEntry.is_dir):
        for second in _entries(Path(first.path), os.DirEntry.is_dir):
            yield from _entries(Path(second.path), os.DirEntry.is_file)


def _entries(folder: Path, kind: Callable[..., bool]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if kind(entry, follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def disk_options(spec: TierSpec) -> DiskOptions:
    """Parse the options of a disk URL.

    Raises:
        UsageError: an option is unknown or missing, or its value is invalid.
    """
    spec.check_options(("size", "direct", "sync", "encrypt"))
    if spec.host or not spec.path.strip("/"):
        raise UsageError(
            f"tier {spec.text}: the folder must be an absolute path, with three slashes: disk:///FOLDER?size=20GiB",
            field="tier",
        )
    if "size" not in spec.options:
        raise UsageError(f"tier {spec.text}: size= is missing, for example size=20GiB", field="tier")
    return DiskOptions(
        text=spec.text,
        folder=Path(spec.path),
        max_bytes=spec.option("size", size_bytes, 0),
        direct=spec.option("direct", _auto_on_off, "auto"),
        sync=spec.option("sync", boolean, False),
        encrypt=spec.option("encrypt", boolean, False),
    )


def _auto_on_off(text: str) -> str:
    return "auto" if text == "auto" else "on" if boolean(text) else "off"


def open_tier(spec: TierSpec, *, object_bytes: int, secret: bytes, clock: Clock) -> DiskTier:
    """Open a disk tier: create its folder, probe direct I/O and scan the folder.

    Args:
        spec: the parsed URL.
        object_bytes: length of every object.
        secret: the pool's tier secret, at least 16 bytes.
        clock: clock of the deadlines.

    Raises:
        UsageError: an option is invalid, a package is missing, or the folder cannot be used.
    """
    options = disk_options(spec)
    frames = Frames(secret, object_bytes, encrypt=options.encrypt)
    try:
        options.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        direct = options.direct != "off" and direct_is_better(
            options.folder, clock, must=options.direct == "on", object_bytes=object_bytes
        )
        tier = DiskTier(options, frames, clock, direct=direct)
        tier.scan()
    except OSError as error:
        raise UsageError(
            f"tier {spec.text}: its folder cannot be used ({error.strerror or type(error).__name__})", field="tier"
        ) from error
    if options.direct == "on" and not direct:
        raise UsageError(
            f"tier {spec.text}: this file system does not support direct I/O; use direct=auto", field="tier"
        )
    _log.info("tier %s: %d bytes found, %s", spec.text, tier.num_bytes, "direct I/O" if direct else "page cache")
    return tier
