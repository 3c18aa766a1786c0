"""Loads adapters on a thread, so that the steps of the engine go on meanwhile."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvferry.core.errors import KvferryError
from kvferry.core.ids import AdapterId
from kvferry.engine.schedule.adapters.adapter_store import LoadedAdapter
from kvferry.engine.schedule.messages import AdapterLoaded


class AdapterLoads:
    """Loads of one engine, one after the other."""

    def __init__(self, load: Callable[[Path], LoadedAdapter], post: Callable[[AdapterLoaded], None]) -> None:
        """
        Args:
            load: reads an adapter from its folder; raises ModelFileError.
            post: puts the outcome into the queue of the engine's owner; called on another thread.
        """
        self._load = load
        self._post = post
        self._thread = ThreadPoolExecutor(1, "adapter-load")

    def begin(self, adapter: AdapterId, folder: Path) -> None:
        """Begin to load an adapter."""
        self._thread.submit(lambda: self._post(AdapterLoaded(adapter, outcome_of(self._load, folder))))


def outcome_of(load: Callable[[Path], LoadedAdapter], folder: Path) -> LoadedAdapter | KvferryError:
    """Load an adapter; return it, or the error."""
    try:
        return load(folder)
    except KvferryError as error:
        return error
