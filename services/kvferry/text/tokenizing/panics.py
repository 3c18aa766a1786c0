"""Turns panics of the tokenizers library into exceptions."""

from collections.abc import Iterator
from contextlib import contextmanager


class LibraryPanic(Exception):
    """The library's Rust code panicked: it reached a state that its authors considered impossible."""


@contextmanager
def panics_as_exceptions() -> Iterator[None]:
    """Raise `LibraryPanic` for a panic in the `with` block.

    The library's runtime raises a panic as a `BaseException` of a class that cannot be imported, which handlers of
    `Exception` do not catch.

    Raises:
        LibraryPanic: the library panicked.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise LibraryPanic(str(error)) from None
