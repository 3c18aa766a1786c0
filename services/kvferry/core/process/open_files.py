"""Raises this process's limit of open files; each connection uses a file descriptor."""

import resource


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard limit and return it. The default soft limit is low for the sake of
    programs that use `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
