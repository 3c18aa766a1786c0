"""Options that name a file to write at the end of a command, and the file of `--json`."""

import json
import os
from pathlib import Path
from typing import Any

import click

from kvferry.cli.options import print_json


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
        path = super().convert(value, param, ctx)
        folder = Path(os.fsdecode(path)).absolute().parent
        if not folder.is_dir():
            self.fail(f"the folder {str(folder)!r} does not exist; create it, or use another file", param, ctx)
        if not os.access(folder, os.W_OK):
            self.fail(f"the folder {str(folder)!r} is not writable; use another file", param, ctx)
        return path


OUTPUT_FILE = OutputFile()
JSON_FILE = click.option("--json", "json_file", type=OUTPUT_FILE, help="Write the results to a file.")
"""Option for commands that call `write_json`."""


def write_json(file: Path | None, result: dict[str, Any]) -> None:
    """Write results to the file of `--json`, and print them as the last line; without a file, do nothing."""
    if file is not None:
        file.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
        print_json(result)
