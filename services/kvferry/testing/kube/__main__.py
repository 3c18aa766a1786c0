"""`python -m kvferry.testing.kube`: a local Kubernetes to look at by hand."""

import sys
from pathlib import Path

import click

from kvferry.core.errors import KvferryError
from kvferry.testing.kube import assets, cluster, recipes

_FOLDER = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """A local Kubernetes in one folder."""


@main.command()
@_FOLDER
def up(folder: Path) -> None:
    """Start a cluster that stays until `down`."""
    found = assets.find(["control"], say=_say)
    made = cluster.up(folder, found, lasting=True)
    for stage, seconds in made.children.state.seconds.items():
        _say(f"{seconds:6.2f} s  {stage}")
    click.echo(f"export KUBECONFIG={made.kubeconfig}")
    click.echo(f"{found.path('kubectl')} get namespaces")


@main.command()
@_FOLDER
def down(folder: Path) -> None:
    """End a cluster and remove its folder."""
    cluster.down(folder)


@main.command()
@click.argument("sets", nargs=-1, type=click.Choice(recipes.SETS))
def build(sets: tuple[str, ...]) -> None:
    """Build binaries that are missing; all sets unless some are named."""
    click.echo(assets.find(sets or recipes.SETS, say=_say).folder)


def _say(text: str) -> None:
    click.echo(text, err=True)


if __name__ == "__main__":
    try:
        main(prog_name="python -m kvferry.testing.kube")
    except KvferryError as error:
        sys.exit(f"kube: {error}")
