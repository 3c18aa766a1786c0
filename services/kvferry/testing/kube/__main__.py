"""`python -m kvferry.testing.kube`: a local Kubernetes to look at by hand."""

import os
import sys
from importlib.metadata import version
from pathlib import Path

import click

from kvferry.core.errors import KvferryError, UsageError
from kvferry.testing.kube import assets, box, cluster, host_image, python_image, recipes
from kvferry.testing.kube.cluster import NodeWish

_FOLDER = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """A local Kubernetes in one folder."""


@main.command()
@_FOLDER
@click.option("--node", is_flag=True, help="With a node that runs pods (needs root).")
@click.option(
    "--models", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Seen by host containers."
)
@click.option("--model", help="One of the catalog, put where pools of the node find it.")
def up(folder: Path, node: bool, models: Path | None, model: str | None) -> None:
    """Start a cluster that stays until `down`."""
    wish = None
    if node:
        if reason := box.why_not():
            raise UsageError(reason, field="--node")
        wish = NodeWish(host_image.folders([models] if models else []))
    found = assets.find(["control", "node"] if node else ["control"], say=_say)
    made = cluster.up(folder, found, wish=wish, lasting=True)
    if wish is not None:
        made.load(host_image.write(made.folder / "host.tar", wish.host_folders))
        if model:
            made.keep_model(model)
    for stage, seconds in made.children.state.seconds.items():
        _say(f"{seconds:6.2f} s  {stage}")
    click.echo(f"export KUBECONFIG={made.kubeconfig}")
    click.echo(f"export PATH={found.folder}:$PATH")
    click.echo(f"kubectl get {'nodes' if node else 'namespaces'}")
    if model:
        click.echo("# docs/try-on-kubernetes.md goes on from here")


@main.command()
@_FOLDER
def down(folder: Path) -> None:
    """End a cluster and remove its folder."""
    cluster.down(folder)


@main.command()
@_FOLDER
@click.argument("archive", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def load(folder: Path, archive: Path) -> None:
    """Give the node an image, from an OCI archive."""
    cluster.attach(folder, assets.find([])).load(archive)


@main.command(context_settings={"ignore_unknown_options": True})
@_FOLDER
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED)
def sh(folder: Path, words: tuple[str, ...]) -> None:
    """Run a command on the node."""
    enter = cluster.attach(folder, assets.find([])).box.enter
    os.execvp(enter[0], [*enter, *words])  # noqa: S606


@main.command()
@click.argument("sets", nargs=-1, type=click.Choice(recipes.SETS))
def build(sets: tuple[str, ...]) -> None:
    """Build binaries that are missing; all sets unless some are named."""
    click.echo(assets.find(sets or recipes.SETS, say=_say).folder)


@main.command()
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--scratch", type=click.Path(path_type=Path), default=Path("build/image"), show_default=True)
def image(out: Path, scratch: Path) -> None:
    """Write the image of kvferry as an OCI archive."""
    # A name without a host would be taken for one of a public registry, also where it is only looked up.
    name = f"localhost/kvferry:{version('kvferry')}"
    digest = python_image.write(out, scratch, name, _say)
    click.echo(f"{out}: {name} {digest}, {out.stat().st_size >> 20} MiB")


def _say(text: str) -> None:
    click.echo(text, err=True)


if __name__ == "__main__":
    try:
        main(prog_name="python -m kvferry.testing.kube")
    except KvferryError as error:
        sys.exit(f"kube: {error}")
