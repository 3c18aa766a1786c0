"""`kvferry operator`: run the operator, or see what a change of a pool would do before anyone takes it."""

import asyncio
import socket
from importlib.metadata import version
from pathlib import Path

import click

from kvferry.cli import settings
from kvferry.cli.options import Values, with_settings
from kvferry.cli.supervised import announce, follow_parent
from kvferry.core.errors import UsageError


@click.group("operator")
def command() -> None:
    """Reconcile InferencePool resources into running pods.

    \b
      kvferry operator run                         in a pod, or against the current kubeconfig
      kvferry operator plan old.yaml new.yaml      the steps of a rollout, before anyone takes them
    """


@command.command("run")
@with_settings(settings.OPERATOR)
def run(values: Values) -> None:
    """Run the operator until SIGTERM. Several may run: one leads, the others wait for its lease.

    \b
      kvferry operator run --namespace team-a --namespace team-b
      kvferry operator run --kubeconfig ~/.kube/config --health 127.0.0.1:8080
    """
    from kvferry.operator.api import KubeApi
    from kvferry.operator.lease import LeaseTimes
    from kvferry.operator.run import OperatorConfig, run_operator

    lease = values["lease_seconds"]
    config = OperatorConfig(
        default_image=values["image"] or f"kvferry:{version('kvferry')}",
        namespaces=tuple(values["namespace"]),
        own_namespace=values["lease_namespace"],
        identity=values["identity"] or socket.gethostname(),
        lease=LeaseTimes(duration=lease, renew=lease / 5, deadline=lease * 2 / 3),
        health_address=values["health"],
        pulse_seconds=values["pulse_seconds"],
        look_seconds=values["look_seconds"],
        workers=values["workers"],
    )
    follow_parent()
    raise SystemExit(asyncio.run(run_operator(config, KubeApi.connect(values["kubeconfig"]), announce)))


@command.command("check")
@with_settings(settings.OPERATOR_CHECK)
def check(values: Values) -> None:
    """See that the definitions are there and that an operator leads; what `helm test` runs.

    \b
      kvferry operator check --lease-namespace kvferry
    """
    from kvferry.core.errors import Unavailable
    from kvferry.operator.api import KubeApi
    from kvferry.operator.run import leader_of

    deadline = values["timeout"]
    holder = asyncio.run(leader_of(KubeApi.connect(values["kubeconfig"]), values["lease_namespace"], deadline))
    if not holder:
        raise Unavailable(
            f"no operator leads: the lease in namespace {values['lease_namespace']} has had no living holder for "
            f"{deadline:.0f} s; see the logs of the operator's pods"
        )
    click.echo(f"{holder} leads")


@command.command("plan")
@click.argument("old", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("new", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--image", default="", help="The operator's default image; matters where a pool names none.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def plan(old: Path, new: Path, image: str, as_json: bool) -> None:
    """Print what happens when a pool changes from OLD to NEW: which pods, in which steps, with what left to serve.

    \b
      kvferry operator plan pool.yaml pool-new.yaml
      kubectl get kvpool chat -o yaml | kvferry operator plan /dev/stdin pool-new.yaml
    """
    from kvferry.cli.options import reported
    from kvferry.operator.preview import preview, read_pool

    with reported():
        default = image or f"kvferry:{version('kvferry')}"
        found = preview(read_pool(old), read_pool(new), default)
        if found.name_differs:
            raise UsageError(f"{old} and {new} are different pools", field="new")
        click.echo(found.as_json() if as_json else found.as_text())
