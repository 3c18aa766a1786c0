"""`kvferry completion`: prints the script that completes commands, flags and values in a shell."""

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script that completes kvferry's commands, flags and values in SHELL.

    \b
      source <(kvferry completion bash)                                  in ~/.bashrc
      source <(kvferry completion zsh)                                   in ~/.zshrc
      kvferry completion fish > ~/.config/fish/completions/kvferry.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click supports the shells of SHELLS"
    click.echo(kind(context.find_root().command, {}, "kvferry", "_KVFERRY_COMPLETE").source())
