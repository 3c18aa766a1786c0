"""Entry point of the `kvferry` command line."""

import errno
import os
import sys
from importlib import import_module
from importlib.metadata import version
from typing import Any

import click

from kvferry.core.process.config import silence_grpc

# (module, help text) by subcommand; a module is imported only when its command runs, so that `--help` is fast.
_COMMANDS = {
    "demo": (
        "kvferry.cli.commands.demo",
        "Run one request through prefill, hand-off and decode, and print a timeline.",
    ),
    "up": ("kvferry.cli.commands.up", "Run the whole stack on this machine."),
    "chat": ("kvferry.cli.commands.chat", "Chat with a running gateway, or get one answer."),
    "worker": ("kvferry.cli.commands.worker", "Run one worker process."),
    "gateway": ("kvferry.cli.commands.gateway", "Run one gateway process."),
    "operator": ("kvferry.cli.commands.operator", "Reconcile InferencePools in Kubernetes, and preview a rollout."),
    "bench": ("kvferry.cli.commands.bench", "Measure performance and compare it with bounds."),
    "simulate": (
        "kvferry.cli.simulating.simulate",
        "Simulate a fleet under a workload: the production scheduling and routing code in virtual time.",
    ),
    "plan": ("kvferry.cli.simulating.plan", "Find the smallest number of workers for several loads, in the simulator."),
    "tune": ("kvferry.cli.simulating.tune", "Search for settings of a fleet with higher goodput, in the simulator."),
    "profile": (
        "kvferry.cli.commands.profile_steps",
        "Record the steps of an engine as a trace and a log, and replay them.",
    ),
    "doctor": ("kvferry.cli.commands.doctor", "Inspect and measure this machine, or inspect a cluster."),
    "explain": ("kvferry.cli.commands.explain", "Explain an ended request: route, source of its KV, timing."),
    "key": ("kvferry.cli.commands.key", "Create the keys with which a pool's processes authenticate each other."),
    "model": ("kvferry.cli.commands.model", "List, fetch and inspect models."),
    "pull": ("kvferry.cli.commands.pull", "Download a model of the Hugging Face Hub, or a known one."),
}


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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


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

    Every flag can also be set as KVFERRY_<FLAG> in the environment or in a TOML file (--config).
    """


if __name__ == "__main__":
    main()
