"""Runs asynchronous work for a blocking caller, also one whose thread has a running event loop, as in notebooks."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end and return its result. An interrupt cancels it.

    Args:
        work: the work.

    Raises:
        BaseException: raised by the work.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    outcome: Future[T] = Future()
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = Future()

    async def main() -> T:
        begun.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await work

    def thread() -> None:
        try:
            outcome.set_result(asyncio.run(main()))
        except BaseException as error:
            outcome.set_exception(error)

    worker = threading.Thread(target=thread, name="offline")
    worker.start()
    try:
        return outcome.result()
    except BaseException:
        loop, task = begun.result()
        if task is not None and not outcome.done():
            loop.call_soon_threadsafe(task.cancel)
        raise
    finally:
        worker.join()
