"""Calls on threads with a stack of a stated size, which does not depend on the limits of the shell."""

import threading
from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")
_lock = threading.Lock()
"""Held while the size of new threads' stacks is changed, which is a setting of the process."""


def call_with_stack(stack_bytes: int, function: Callable[[], R]) -> R:
    """Return `function()`, called on a new thread: for libraries that recurse, and end the process when the stack
    overflows.

    Args:
        stack_bytes: size of the stack in bytes; memory is used only as far as the stack grows.
        function: called once.

    Raises:
        Exception: raised by `function`.
    """
    result: list[R] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="large-stack")
    with _lock:
        before = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if failure:
        raise failure[0]
    return result[0]
