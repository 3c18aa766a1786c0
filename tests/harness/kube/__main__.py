"""`python -m harness.kube`: manages a local Kubernetes cluster for manual use."""

import os
import sys
from importlib.metadata import version
from pathlib import Path

import click

from harness.kube import assets, box, cluster, host_image, python_image, recipes
from harness.kube.cluster import NodeOptions
from kvferry.core.errors import KvferryError, UsageError

_FOLDER = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Manage a local Kubernetes cluster in a folder."""


@main.command()
@_FOLDER
@click.option("--node", is_flag=True, help="Start a node that runs pods (needs root).")
@click.option(
    "--models",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Host folder that containers with the runtime `host` can access.",
)
@click.option("--model", help="Name of a catalog model to copy into the node's model cache.")
def up(folder: Path, node: bool, models: Path | None, model: str | None) -> None:
    """Start a cluster that runs until `down`."""
    node_options = None
    if node:
        if reason := box.why_not():
            raise UsageError(reason, field="--node")
        node_options = NodeOptions(host_image.folders([models] if models else []))
    found = assets.find(["control", "node"] if node else ["control"], say=_say)
    made = cluster.up(folder, found, node_options=node_options, lasting=True)
    if node_options is not None:
        made.load(host_image.write(made.folder / "host.tar", node_options.host_folders))
        if model:
            made.keep_model(model)
    for stage, seconds in made.children.state.seconds.items():
        _say(f"{seconds:6.2f} s  {stage}")
    click.echo(f"export KUBECONFIG={made.kubeconfig}")
    click.echo(f"export PATH={found.folder}:$PATH")
    click.echo(f"kubectl get {'nodes' if node else 'namespaces'}")
    if model:
        click.echo("# continue with docs/try-on-kubernetes.md")


@main.command()
@_FOLDER
def down(folder: Path) -> None:
    """Stop a cluster and remove its folder."""
    cluster.down(folder)


@main.command()
@_FOLDER
@click.argument("archive", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def load(folder: Path, archive: Path) -> None:
    """Import an image into the node from an OCI archive."""
    cluster.attach(folder, assets.find([])).load(archive)


@main.command(context_settings={"ignore_unknown_options": True})
@_FOLDER
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED)
def sh(folder: Path, words: tuple[str, ...]) -> None:
    """Run a command on the node."""
    enter = cluster.attach(folder, assets.find([])).box.enter
    os.execvp(enter[0], [*enter, *words])


@main.command()
@click.argument("sets", nargs=-1, type=click.Choice(recipes.SETS))
def build(sets: tuple[str, ...]) -> None:
    """Build the missing binaries of these sets; by default of all sets."""
    click.echo(assets.find(sets or recipes.SETS, say=_say).folder)


@main.command()
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--scratch", type=click.Path(path_type=Path), default=Path("build/image"), show_default=True)
@click.option("--cuda", is_flag=True, help="Include CUDA's libraries and a C compiler, for workers on GPUs.")
def image(out: Path, scratch: Path, cuda: bool) -> None:
    """Write kvferry's image as an OCI archive."""
    # An image name without a host refers to a public registry, even if only local images are searched.
    name = f"localhost/kvferry:{version('kvferry')}{'-cuda' if cuda else ''}"
    digest = python_image.write(out, scratch, name, _say, cuda=cuda)
    click.echo(f"{out}: {name} {digest}, {out.stat().st_size >> 20} MiB")


def _say(text: str) -> None:
    click.echo(text, err=True)


if __name__ == "__main__":
    try:
        main(prog_name="python -m harness.kube")
    except KvferryError as error:
        sys.exit(f"kube: {error}")
