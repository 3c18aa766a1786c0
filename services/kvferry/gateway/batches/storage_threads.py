"""The threads on which a storage of files and batches blocks."""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

NUM_THREADS = 4
P = ParamSpec("P")
R = TypeVar("R")


class StorageThreads:
    """A few threads, so that a slow storage delays nothing else, and a few for calls that read whole files.

    The latter may take all their threads for minutes, while the lease of the runner has to be renewed, and tenants call
    the API.
    """

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix=name)
        self._long_threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix=f"{name}, long")

    async def run(self, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function on one of the threads."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(call, *args, **kwargs))

    async def run_long(self, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function that reads a whole file."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._long_threads, functools.partial(call, *args, **kwargs))

    def shutdown(self) -> None:
        """End the threads after their calls; do not wait."""
        self._threads.shutdown(wait=False)
        self._long_threads.shutdown(wait=False)
