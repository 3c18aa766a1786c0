"""Settings that come from outside the process; the only reader of the environment."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where downloaded files are kept: `$XDG_CACHE_HOME/kvferry`, or `~/.cache/kvferry`.

    The XDG base directory specification says that a relative `XDG_CACHE_HOME` is to be ignored.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "kvferry"
