"""Raises this process's limit of open files, and derives limits of connections, each of which uses a descriptor."""

import resource


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard limit and return it. The default soft limit is low for the sake of
    programs that use `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


_RESERVED_FILES = 256
"""Open files for everything but clients' connections."""


def max_connections(most: int, share: float) -> int:
    """Return the maximum number of connections of one server of this process.

    Args:
        most: upper limit.
        share: share of the open files that are not reserved, 0 to 1; all servers together have at most 1.
    """
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if open_files == resource.RLIM_INFINITY:
        return most
    return max(1, min(most, int((open_files - _RESERVED_FILES) * share)))
