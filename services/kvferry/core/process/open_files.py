"""Raises this process's limit on open files, and derives connection limits from it: each connection uses a
descriptor."""

import resource


def raise_open_files() -> int:
    """Raise the soft limit on open files to the hard limit and return it. The default soft limit is low for the sake of
    programs that use `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


_RESERVED_FILES = 256
"""Open files reserved for everything but client connections."""


def max_connections(limit: int, share: float) -> int:
    """Return the maximum number of connections of one server of this process.

    Args:
        limit: upper limit.
        share: share of the unreserved open files, 0 to 1; the shares of all servers sum to at most 1.
    """
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if open_files == resource.RLIM_INFINITY:
        return limit
    return max(1, min(limit, int((open_files - _RESERVED_FILES) * share)))
