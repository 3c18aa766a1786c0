"""The process's surroundings: environment variables, the settings file, the cache folder. Their only reader."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from kvferry.core.errors import UsageError
from kvferry.core.settings import ENVIRONMENT_PREFIX

_MAX_FILE_BYTES = 1 << 20


def environment() -> Mapping[str, str]:
    """The environment variables."""
    return os.environ


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that we start: ours without our own settings, then `changes`.

    What was set for us reaches a child as flags; the same variable may mean another thing to it.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(ENVIRONMENT_PREFIX)}
    return {**inherited, **changes}


def cache_dir() -> Path:
    """Where downloaded files are kept: `$XDG_CACHE_HOME/kvferry`, or `~/.cache/kvferry`.

    The XDG base directory specification says that a relative `XDG_CACHE_HOME` is to be ignored.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "kvferry"


def read_settings_file(path: Path | None) -> dict[str, object]:
    """The settings in a TOML file; nothing when `path` is `None`.

    Raises:
        UsageError: it cannot be read, or is not TOML.
    """
    if path is None:
        return {}
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise UsageError(f"{path} is larger than {_MAX_FILE_BYTES} bytes; is it the settings file?", field="config")
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read the settings file {path}: {error}", field="config") from error


def read_secret_file(path: Path, field: str) -> bytes:
    """A secret's bytes, without the newline that editors add.

    Raises:
        UsageError: it cannot be read, or is empty.
    """
    try:
        secret = path.read_bytes()[:_MAX_FILE_BYTES].strip()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", field=field) from error
    if not secret:
        raise UsageError(f"{path} is empty; write a secret of at least 16 bytes into it", field=field)
    return secret
