"""Options that name a file to write at the end of a command, and the file of `--json`."""

import json
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import click

from kvferry.cli.options import print_json
from kvferry.core.errors import UsageError, shortened


class OutputFile(click.Path):
    """Parameter type for an output file. The folder must exist and be writable, so that a long run does not lose its
    results at the end."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path.

        Raises:
            click.BadParameter: the folder does not exist or is not writable, or the path is a folder.
        """
        try:
            path = super().convert(value, param, ctx)
            is_folder = Path(os.fsdecode(path)).resolve().is_dir()
        except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, or with a NUL
            self.fail(f"{shortened(repr(value))} cannot be used: {error_text(error)}; use another file", param, ctx)
        if is_folder:
            self.fail(f"{shortened(repr(value))} is a folder; use a file", param, ctx)
        folder = Path(os.fsdecode(path)).absolute().parent
        if not folder.is_dir():
            self.fail(f"the folder {str(folder)!r} does not exist; create it, or use another file", param, ctx)
        if not os.access(folder, os.W_OK):
            self.fail(f"the folder {str(folder)!r} is not writable; use another file", param, ctx)
        return path


OUTPUT_FILE = OutputFile()
STANDARD_OUTPUT = Path("-")
"""What `--json` takes for the standard output."""


class JsonFile(OutputFile):
    """Parameter type for the file of `--json`; with `-` the JSON is all of the standard output, and text goes to
    standard error."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path.

        Raises:
            click.BadParameter: see `OutputFile`.
        """
        if value not in ("-", STANDARD_OUTPUT):
            return super().convert(value, param, ctx)
        if ctx is not None and _OUTPUT not in ctx.meta:
            ctx.meta[_OUTPUT] = sys.stdout
            ctx.with_resource(redirect_stdout(sys.stderr))
        return STANDARD_OUTPUT


_OUTPUT = "kvferry.standard-output"
JSON_FILE = click.option(
    "--json", "json_file", type=JsonFile(), metavar="FILE|-", help="Write the results to a file; -: to standard output."
)
"""Option for commands that call `write_json`."""


def write_json(file: Path | None, result: Mapping[str, Any]) -> None:
    """Write results to the file of `--json`; without a file, do nothing.

    Raises:
        UsageError: the file cannot be written; the results are printed, so that they are not lost.
    """
    text = json.dumps(result, indent=2, ensure_ascii=False)
    if file == STANDARD_OUTPUT:
        click.echo(text, file=click.get_current_context().meta[_OUTPUT])
    elif file is not None:
        try:
            write_file(file, text + "\n")
        except UsageError:
            print_json(result)
            raise


def write_file(path: Path, text: str) -> None:
    """Write a file. A regular file is replaced as a whole, so that it is never partial, even with two writers.

    Raises:
        UsageError: it cannot be written; a file that existed is unchanged.
    """
    try:
        target = path.resolve()
        if target.exists() and not target.is_file():  # a device or a pipe
            path.write_text(text, "utf-8")
            return
        fresh = target.with_name(f".kvferry-{os.getpid()}")
        try:
            fresh.write_text(text, "utf-8")
            if target.exists():
                fresh.chmod(target.stat().st_mode)
            fresh.replace(target)
        finally:
            with suppress(OSError):
                fresh.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error_text(error)}; use another file", field="output") from None


def check_distinct(*paths: Path | None) -> None:
    """Check that no two of the files that a command reads and writes are the same.

    Raises:
        UsageError: two paths resolve to the same file; devices and pipes may occur more than once.
    """
    found: set[Path] = set()
    for path in filter(None, paths):
        with suppress(OSError, RuntimeError):  # a file that cannot be read is reported when it is read
            target = path.resolve()
            if target in found and (target.is_file() or not target.exists()):
                raise UsageError(f"{path} is given twice; write the results to another file", field="output")
            found.add(target)


def error_text(error: Exception) -> str:
    """Return the reason of a file error as text."""
    return getattr(error, "strerror", None) or str(error)
