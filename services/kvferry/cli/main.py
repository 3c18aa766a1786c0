"""Entry point of the `kvferry` command line."""

import errno
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Any

import click
from click.shell_completion import CompletionItem

from kvferry.cli.help_pages import near_names
from kvferry.core.process.config import silence_grpc

# (module, help text) by subcommand; a module is imported only when its command runs, so that `--help` is fast.
_TOPICS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Serve": {
        "up": ("kvferry.cli.commands.up", "Run the whole stack on this machine."),
        "chat": ("kvferry.cli.commands.chat", "Chat with a running gateway, or get one answer."),
        "demo": (
            "kvferry.cli.commands.demo",
            "Run one request through prefill, hand-off and decode, and print a timeline.",
        ),
        "pull": ("kvferry.cli.commands.pull", "Download a model of the Hugging Face Hub, or a known one."),
        "model": ("kvferry.cli.commands.model", "List, fetch and inspect models."),
    },
    "Understand": {
        "explain": ("kvferry.cli.commands.explain", "Explain an ended request: route, source of its KV, timing."),
        "profile": (
            "kvferry.cli.commands.profile_steps",
            "Record the steps of an engine as a trace and a log, and replay them.",
        ),
        "doctor": ("kvferry.cli.commands.doctor", "Inspect and measure this machine, or inspect a cluster."),
        "bench": ("kvferry.cli.commands.bench", "Measure performance and compare it with bounds."),
    },
    "Plan": {
        "plan": (
            "kvferry.cli.simulating.plan",
            "Find the smallest number of workers for several loads, in the simulator.",
        ),
        "tune": (
            "kvferry.cli.simulating.tune",
            "Search for settings of a fleet with higher goodput, in the simulator.",
        ),
        "simulate": (
            "kvferry.cli.simulating.simulate",
            "Simulate a fleet under a workload: the production scheduling and routing code in virtual time.",
        ),
    },
    "Single processes": {
        "worker": ("kvferry.cli.commands.worker", "Run one worker process."),
        "gateway": ("kvferry.cli.commands.gateway", "Run one gateway process."),
        "picker": (
            "kvferry.cli.commands.picker",
            "Run an endpoint picker for gateways of the Gateway API.",
        ),
        "operator": (
            "kvferry.cli.commands.operator",
            "Reconcile InferencePools in Kubernetes, and preview a rollout.",
        ),
        "key": ("kvferry.cli.commands.key", "Create the keys with which a pool's processes authenticate each other."),
    },
    "This command": {
        "completion": ("kvferry.cli.commands.completion", "Print the script of bash, zsh or fish that completes it."),
    },
}
# Names of commands that do the same in other servers.
_ELSEWHERE = {"serve": "up", "run": "up", "download": "pull", "list": "model list"}
_COMMANDS = {name: entry for commands in _TOPICS.values() for name, entry in commands.items()}


class _Lazy(click.Group):
    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            if error.errno != errno.ENOSPC or error.filename is not None:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes standard output again at exit
            click.echo(f"Error: cannot write to the standard output: {error.strerror}; use another file", err=True)
            sys.exit(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        silence_grpc()  # for commands that start or call processes with gRPC
        found = getattr(import_module(_COMMANDS[cmd_name][0]), "command")  # noqa: B009
        if not isinstance(found, click.Command):
            raise TypeError(f"module of subcommand {cmd_name} does not define a click command")
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:
            if meant := _ELSEWHERE.get(error.command_name):
                raise click.UsageError(
                    f"No such command '{error.command_name}'. Did you mean '{meant}'?", ctx
                ) from None
            near = near_names(error.command_name, _COMMANDS)
            raise click.NoSuchCommand(error.command_name, possibilities=near, ctx=ctx) from None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands that begin with `incomplete`, without importing them."""
        begins = {name: about for name, (_, about) in _COMMANDS.items() if name.startswith(incomplete)}
        found = [CompletionItem(name, help=about) for name, about in begins.items()]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for topic, commands in _TOPICS.items():
            with formatter.section(topic):
                formatter.write_dl([(name, text) for name, (_, text) in commands.items()])


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(version("kvferry"), prog_name="kvferry")
def main() -> None:
    """LLM serving with prefill and decode as separate gRPC services that share KV blocks.

    \b
      kvferry demo                     run one request with a timeline, on this machine
      kvferry up                       serve http://127.0.0.1:8000/v1 and gRPC on 127.0.0.1:9000
      kvferry up Qwen/Qwen3-0.6B       a model of the Hugging Face Hub
      kvferry up --prefill 2 --decode 2 --connector nixl
      kvferry chat                     talk to the model that it serves
      kvferry model inspect smollm2-135m-instruct

    Settings can also be set as KVFERRY_<FLAG> in the environment or in a TOML file (--config); --print-config writes
    one. `kvferry completion` makes a shell complete commands, flags and values.
    """


if __name__ == "__main__":
    main()
