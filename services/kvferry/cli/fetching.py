"""Fetches the model of a command once, before processes or threads open it, and shows the progress."""

import sys
from collections.abc import Callable
from dataclasses import replace

import click

from kvferry.cli.options import Values

_MIB = 1 << 20


def fetch_first(values: Values) -> str:
    """Fetch the model of a command if it is one of the Hugging Face Hub, and set it to its commit, so that all
    processes of the command serve the same files. Return the name or path; any other one is unchanged. Idempotent.

    Raises:
        KvferryError: the model does not exist, or cannot be fetched.
    """
    from kvferry.model.hub.download import pinned_model  # reads checkpoints, which would delay `--help`

    has_files = "load_format" not in values.resolved or values["load_format"] != "dummy"
    if has_files:
        model = pinned_model(values["model"], progress_bar())
        values.resolved["model"] = replace(values.resolved["model"], value=model)
    return str(values["model"])


def progress_bar() -> Callable[[str, int, int], None]:
    """Create a progress callback for downloads, which prints only if standard error is a terminal."""
    if not sys.stderr.isatty():
        return lambda *_: None

    def show(stage: str, done: int, total: int) -> None:
        share = f"{100 * done / total:5.1f} %" if total else f"{done / _MIB:.0f} MiB"
        click.echo(f"\r  {stage} {share} ", err=True, nl=done >= total)

    return show
