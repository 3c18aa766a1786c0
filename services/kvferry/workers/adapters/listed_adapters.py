"""Keeps the adapters of an engine equal to a list in a file, which is read again when it changes; those that a call has
removed or replaced are loaded again.

In a cluster, the file is a mounted ConfigMap that the operator writes from `spec.adapters`.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kvferry.core.clock import Clock
from kvferry.core.errors import KvferryError, Unavailable, UnknownModel, UsageError
from kvferry.core.ids import AdapterId
from kvferry.workers.adapters.adapter_list import MAX_LIST_BYTES, ListedAdapter, changes, read_adapter_list
from kvferry.workers.adapters.adapter_loader import AdapterLoader

_log = logging.getLogger(__name__)
_POLL_SECONDS = 2.0
RETRY_SECONDS = 15.0
"""Time in seconds after which a listed adapter that could not be loaded is tried again: its files may still be
incomplete while they are copied.
"""


class ListedAdapters:
    """The adapters of one list. Used on the event loop's thread."""

    def __init__(self, file: Path, loader: AdapterLoader, clock: Clock) -> None:
        """
        Args:
            file: the list (`adapter_list`). While it does not exist or is not valid, nothing changes.
            loader: loads and removes adapters.
            clock: measures the time between tries.
        """
        self._file = file
        self._loader = loader
        self._clock = clock
        self._raw: bytes | None = None
        self._listed: Mapping[str, ListedAdapter] = {}
        self._loaded: dict[str, ListedAdapter] = {}
        self._versions: dict[str, AdapterId] = {}
        """The versions of these adapters that were loaded."""
        self._retry_at: dict[ListedAdapter, float] = {}
        self.failures: dict[str, str] = {}
        """Reason why a listed adapter is not loaded, by its name; under the file's name, the reason why the list cannot
        be used."""

    async def run(self) -> None:
        """Poll the list and apply its changes until cancelled, or until the engine stops."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            try:
                await self.refresh()
            except Unavailable:
                return  # the engine has stopped
            except Exception:  # raised by a library; the next reading may succeed
                _log.exception("reading the list of adapters %s failed", self._file)

    async def refresh(self) -> None:
        """Read the list and apply its changes; retry failed adapters when a retry is due.

        Raises:
            Unavailable: the engine has stopped.
        """
        try:
            raw = await asyncio.to_thread(self._read)
        except OSError as error:
            raw = None
            self._fail(self._file.name, f"cannot read {self._file}: {error.strerror}")
        if raw is not None and raw != self._raw:
            self._raw = raw
            self._take(raw)
        self._forget_changed()
        to_load, to_remove = changes(self._loaded, self._listed)
        for name in to_remove:
            await self._remove(name)
        for one in to_load:
            if self._clock.monotonic() >= self._retry_at.get(one, 0.0):
                await self._load(one)

    def _forget_changed(self) -> None:
        """Have listed adapters loaded again that a call has removed or replaced: the list is what the pool states."""
        served = self._loader.served()
        for name in [name for name in self._loaded if served.get(name) != self._versions[name]]:
            if name in self._listed:
                what = "replaced" if name in served else "removed"
                _log.warning("adapter %s was %s by a call, but is in %s: it is loaded again", name, what, self._file)
                del self._loaded[name]

    def _read(self) -> bytes | None:
        try:
            with self._file.open("rb") as file:
                return file.read(MAX_LIST_BYTES + 1)
        except FileNotFoundError:
            return None

    def _take(self, raw: bytes) -> None:
        try:
            self._listed = read_adapter_list(raw)
        except UsageError as error:
            self._fail(self._file.name, error.message)
            return
        self._retry_at.clear()
        self.failures = {name: why for name, why in self.failures.items() if name in self._listed}

    async def _load(self, one: ListedAdapter) -> None:
        try:
            adapter = await self._loader.load_listed(one.name, Path(one.path), one.digest)
        except Unavailable:
            raise
        except KvferryError as error:
            self._retry_at[one] = self._clock.monotonic() + RETRY_SECONDS
            self._fail(one.name, error.message)
            return
        self._loaded[one.name], self._versions[one.name] = one, adapter
        self._retry_at.pop(one, None)
        self.failures.pop(one.name, None)
        _log.info("adapter %s loaded from %s, digest %s", one.name, one.path, adapter.digest.hex())

    async def _remove(self, name: str) -> None:
        with suppress(UnknownModel):  # an administrator may have removed it by a call
            await self._loader.unload(name)
        del self._loaded[name]
        del self._versions[name]
        _log.info("adapter %s removed", name)

    def _fail(self, name: str, why: str) -> None:
        if self.failures.get(name) != why:  # logged once
            _log.warning("%s: %s", name, why)
        self.failures[name] = why
