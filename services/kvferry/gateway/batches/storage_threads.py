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
    """A few threads, so that a slow storage delays nothing else."""

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix=name)

    async def run(self, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function on one of the threads."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(call, *args, **kwargs))

    def shutdown(self) -> None:
        """End the threads after their calls; do not wait."""
        self._threads.shutdown(wait=False)
