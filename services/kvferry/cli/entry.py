"""Starts the `kvferry` command, or names the extra to install: the base package is the client library alone."""

import sys

_OPERATOR = frozenset({"cel", "jsonschema", "kopf", "kubernetes", "yaml"})
"""Modules of the packages of the extra `operator`; those of all others are in `serve`."""
EXIT_USAGE = 2


def main() -> None:
    """Run the command; exit with status 2 if one of its packages is not installed."""
    try:
        from kvferry.cli.main import main as command  # needs the extra `serve`

        command()
    except ModuleNotFoundError as error:
        name = (error.name or "kvferry").partition(".")[0]
        if name == "kvferry":
            raise
        extra = "operator" if name in _OPERATOR else "serve"
        print(f"Error: {name} is not installed; install it with: pip install 'kvferry[{extra}]'", file=sys.stderr)
        sys.exit(EXIT_USAGE)
