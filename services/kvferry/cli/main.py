"""`kvferry`: the command line."""

from importlib import import_module
from importlib.metadata import version

import click

# Subcommand to module; a module is loaded only when its command runs, so that `--help` is quick.
_COMMANDS = {
    "demo": ("kvferry.cli.demo", "One request through prefill, hand-off and decode, with a timeline."),
    "up": ("kvferry.cli.up", "The whole stack on this machine, kept running."),
    "worker": ("kvferry.cli.worker", "One worker process."),
    "gateway": ("kvferry.cli.gateway", "One gateway process."),
    "operator": ("kvferry.cli.operator", "Reconcile InferencePools in Kubernetes, and preview a rollout."),
    "bench": ("kvferry.cli.bench", "Measurements, each against its bound."),
    "doctor": ("kvferry.cli.doctor", "What this machine can do, and when loading KV pays."),
    "explain": ("kvferry.cli.explain", "Why this replica, why this source of KV, where the time went."),
    "model": ("kvferry.cli.model", "List, fetch and inspect models."),
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        found = getattr(import_module(_COMMANDS[cmd_name][0]), "command")  # noqa: B009  the module's, not ours
        if not isinstance(found, click.Command):
            raise TypeError(f"{cmd_name} is no command")
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(version("kvferry"), prog_name="kvferry")
def main() -> None:
    """LLM serving with prefill and decode as separate gRPC services that share KV blocks.

    \b
      kvferry demo                     see one request travel, on this machine
      kvferry up                       serve http://127.0.0.1:8000/v1 and gRPC on 127.0.0.1:9000
      kvferry up --prefill 2 --decode 2 --connector nixl
      kvferry model inspect smollm2-135m-instruct

    Every flag can also be set as KVFERRY_<FLAG> in the environment or in a TOML file (--config).
    """


if __name__ == "__main__":
    main()
