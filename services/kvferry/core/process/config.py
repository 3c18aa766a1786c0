"""Reads environment variables, the settings file and the cache folder; no other module reads them."""

import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from kvferry.core.errors import UsageError
from kvferry.core.process.toml_text import parse_toml
from kvferry.core.settings.setting import ENVIRONMENT_PREFIX

_MAX_FILE_BYTES = 1 << 20


def environment() -> Mapping[str, str]:
    """Return this process's environment variables."""
    return os.environ


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables for a child process: those of this process without kvferry's settings, updated by
    `changes`.

    Settings are passed to children as flags, since a variable may have a different meaning for the child's command.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(ENVIRONMENT_PREFIX)}
    return {**inherited, **changes}


def forget_variables(names: Iterable[str]) -> None:
    """Remove environment variables, which children that are started without an environment of their own would inherit.

    Args:
        names: names of variables with secrets, which have been read.
    """
    for name in names:
        os.environ.pop(name, None)


def silence_grpc() -> None:
    """Turn off gRPC's own log, unless the environment sets its level: gRPC logs a line for each connection whose TLS
    handshake fails, and kvferry reports the errors of calls itself. Must be called before gRPC is imported.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def silence_hub_telemetry() -> None:
    """Make huggingface_hub tell the hub nothing about this process but versions, unless the environment sets this: by
    default it sends which coding agent has started the process. Must be called before huggingface_hub is imported.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def tokenize_on_one_thread() -> None:
    """Make the tokenizer library use only the calling thread, unless the environment sets this: waking a thread pool
    takes longer than tokenizing a text, and the pool would compete with the model for the cores."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def show_one_gpu(number: int) -> None:
    """Make only one of this process's GPUs visible to CUDA, as device 0. Must be called before CUDA is initialized.

    Args:
        number: index among the GPUs that are visible now.
    """
    visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    if number < len(visible):
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[number]
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1" if visible else str(number)


def cache_dir() -> Path:
    """Return the folder for downloaded files: `$XDG_CACHE_HOME/kvferry`, or `~/.cache/kvferry`.

    A relative `XDG_CACHE_HOME` is ignored, as the XDG base directory specification requires.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "kvferry"


def check_regular(path: Path, field: str, *, most_bytes: int, expected: str) -> None:
    """Check that a file that is read whole is regular and not too large.

    Args:
        path: the file.
        field: name of the setting, for error messages.
        most_bytes: maximum size of the file.
        expected: what to use instead, for error messages.

    Raises:
        OSError: there is no such file.
        UsageError: the file is not a regular file, or is too large.
    """
    if not path.is_file() and path.exists():  # a device may have no end, and a pipe no writer
        raise UsageError(f"{path} is not a regular file; use {expected}", field=field)
    if path.stat().st_size > most_bytes:
        raise UsageError(f"{path} is larger than {most_bytes} bytes; use {expected}", field=field)


def read_settings_file(path: Path | None) -> dict[str, object]:
    """Read the settings in a TOML file; return an empty mapping if `path` is `None`.

    Raises:
        UsageError: the file cannot be read, or is not TOML.
    """
    if path is None:
        return {}
    try:
        check_regular(path, "config", most_bytes=_MAX_FILE_BYTES, expected="a TOML file with settings")
        return parse_toml(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the settings file {path}: {error}", field="config") from error


def read_secret_file(path: Path, field: str) -> bytes:
    """Read a secret from a regular file, without a trailing newline.

    Args:
        path: the file, at most 1 MiB.
        field: name of the setting, for error messages.

    Raises:
        UsageError: the file cannot be read, is not a regular file, is too large, or is empty.
    """
    try:
        check_regular(path, field, most_bytes=_MAX_FILE_BYTES, expected="a regular file that contains the secret")
        secret = path.read_bytes().strip()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", field=field) from error
    if not secret:
        raise UsageError(f"{path} is empty; write a secret of at least 16 bytes into it", field=field)
    return secret


def lasting_secret(name: str) -> str:
    """Return a secret of this user on this machine; the first call generates it and stores it in the cache folder.

    Raises:
        UsageError: the secret's file can be neither read nor created.
    """
    path = cache_dir() / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        with suppress(FileExistsError):
            os.link(fresh, path)  # atomic: the first process wins
        fresh.unlink()
    except OSError as error:
        raise UsageError(f"cannot store a secret in {path}: {error.strerror}", field=name) from error
    return read_secret_file(path, name).decode()
