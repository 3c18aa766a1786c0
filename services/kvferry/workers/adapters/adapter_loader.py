"""Loading and removal of the adapters of one engine while it serves."""

import asyncio
import functools
from collections.abc import Callable, Mapping
from pathlib import Path

from kvferry.core.errors import InvalidRequest, ModelFileError, UsageError
from kvferry.core.ids import AdapterId
from kvferry.engine.adapter_settings import check_adapter_name
from kvferry.engine.build import LoadedModel, load_adapter
from kvferry.engine.loop.engine_loop import EngineLoop
from kvferry.workers.allowed_path import AllowedFolder


class AdapterLoader:
    """Loads adapters into one engine. Used on the event loop's thread; folders are read on another thread, one at a
    time."""

    def __init__(self, model: LoadedModel, loop: EngineLoop, folder: str) -> None:
        """
        Args:
            model: the model that the adapters update.
            loop: the engine's loop.
            folder: folder below which callers may load adapters; empty refuses all.
        """
        self._model = model
        self._loop = loop
        self._allowed = AllowedFolder(
            folder,
            "lora_path",
            "a folder",
            "adapter folder",
            "this worker does not load adapters at run time; start it with --adapter-folder",
        )
        self.turn = asyncio.Lock()
        """Held while adapters change; the weights of the model do not change meanwhile."""

    def served(self) -> Mapping[str, AdapterId]:
        """Return the current version of each adapter by name."""
        return {info.adapter.name: info.adapter for info in self._loop.adapters if info.retired_until is None}

    async def load(self, name: str, path: str) -> AdapterId:
        """Load an adapter for a caller, or replace the one with the same name, and return its version.

        Args:
            name: name of the adapter.
            path: the adapter's folder, below the configured folder.

        Raises:
            InvalidRequest: the name is not valid, or the folder is missing or damaged or does not fit the model.
            Forbidden: the path is not below the configured folder, or none is configured.
            Unavailable: the engine has stopped.
        """
        try:
            return await self._load(name, functools.partial(self._allowed.resolved, path), "")
        except (ModelFileError, UsageError) as error:
            raise InvalidRequest(error.message, field=error.field or "lora_path", reason="ADAPTER_INVALID") from error

    async def load_listed(self, name: str, path: Path, digest: str) -> AdapterId:
        """Load an adapter that the worker's administrator has listed, from any folder.

        Args:
            name: its name.
            path: its folder.
            digest: hexadecimal digits with which the digest of its content must begin; empty for any.

        Raises:
            UsageError: the name is not valid, or the engine does not support adapters.
            ModelFileError: the folder is missing or damaged, does not fit the model, or has another digest.
            InvalidRequest: too many adapters are registered.
            Unavailable: the engine has stopped.
        """
        return await self._load(name, lambda: path, digest)

    async def _load(self, name: str, folder: Callable[[], Path], digest: str) -> AdapterId:
        async with self.turn:
            check_adapter_name(name, self._model.config.name)
            loaded = await asyncio.to_thread(lambda: load_adapter(self._model, folder()))
            if not loaded.digest.hex().startswith(digest):
                raise ModelFileError(
                    f"the content of {loaded.path} has digest {loaded.digest.hex()}, not {digest}; correct digest in "
                    "the list or the files",
                    reason="ADAPTER_DIGEST",
                )
            return await self._loop.change_adapter(name, loaded)

    async def unload(self, name: str) -> AdapterId:
        """Remove an adapter and return its version.

        Raises:
            UnknownModel: no adapter has this name.
            Unavailable: the engine has stopped.
        """
        async with self.turn:
            return await self._loop.change_adapter(name, None)
