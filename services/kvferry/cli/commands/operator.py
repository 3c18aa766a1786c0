"""`kvferry operator`: runs the operator, checks that it is running, or previews a change to a pool."""

import asyncio
import socket
from importlib.metadata import version
from pathlib import Path

import click

from kvferry.cli import operator_settings
from kvferry.cli.help_pages import SettingsCommand
from kvferry.cli.options import Values, with_settings
from kvferry.cli.supervised import announce, follow_parent


@click.group("operator")
def command() -> None:
    """Reconcile InferencePool resources.

    \b
      kvferry operator run                         in a pod, or against the current kubeconfig
      kvferry operator plan old.yaml new.yaml      preview the steps and writes of a change
    """


@command.command("run", cls=SettingsCommand)
@with_settings(operator_settings.OPERATOR)
def run(values: Values) -> None:
    """Run the operator until SIGTERM. One replica holds the lease; other replicas are on standby.

    \b
      kvferry operator run --namespace team-a --namespace team-b
      kvferry operator run --kubeconfig ~/.kube/config --health 127.0.0.1:8080
    """
    from kvferry.operator.api import KubeApi
    from kvferry.operator.plan.process.lease import LeaseTimes
    from kvferry.operator.plan.template_policy import TemplatePolicy
    from kvferry.operator.process.config import OperatorConfig
    from kvferry.operator.process.run import run_operator

    lease = values["lease_seconds"]
    config = OperatorConfig(
        default_image=values["image"] or f"kvferry:{version('kvferry')}",
        template_policy=TemplatePolicy(values["template"]),
        namespaces=tuple(values["namespace"]),
        own_namespace=values["lease_namespace"],
        identity=values["identity"] or socket.gethostname(),
        lease=LeaseTimes(duration=lease, renew=lease / 5, deadline=lease * 2 / 3),
        health_address=values["health"],
        watch_probe_seconds=values["watch_probe_seconds"],
        discovery_seconds=values["discovery_seconds"],
        workers=values["workers"],
    )
    follow_parent()
    raise SystemExit(asyncio.run(run_operator(config, KubeApi.connect(values["kubeconfig"]), announce)))


@command.command("check", cls=SettingsCommand)
@with_settings(operator_settings.OPERATOR_CHECK)
def check(values: Values) -> None:
    """Check that an operator holds and renews the lease. `helm test` runs this command.

    \b
      kvferry operator check --lease-namespace kvferry
    """
    from kvferry.core.errors import Unavailable
    from kvferry.operator.api import KubeApi
    from kvferry.operator.process.leader import leader_of

    deadline = values["timeout"]
    holder = asyncio.run(leader_of(KubeApi.connect(values["kubeconfig"]), values["lease_namespace"], deadline))
    if not holder:
        raise Unavailable(
            f"no operator is leading: the lease in namespace {values['lease_namespace']} was not renewed for "
            f"{deadline:.0f} s; see the logs of the operator pods"
        )
    click.echo(f"{holder} leads")


@command.command("plan")
@click.argument("old", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("new", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--image", default="", help="The operator's default image, for pools without spec.image.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def plan(old: Path, new: Path, image: str, as_json: bool) -> None:
    """Preview the change of a pool from OLD to NEW: rollout steps with serving capacity, and the writes of each
    reconcile. Assumes that every pod becomes ready and no write fails. A pool or a change that the API server would
    refuse is an error (exit status 2) that names each field.

    \b
      kvferry operator plan pool.yaml pool-new.yaml
      kubectl get kvpool chat -o yaml | kvferry operator plan /dev/stdin pool-new.yaml
    """
    from kvferry.cli.options import reported
    from kvferry.operator.preview.preview import preview, read_change

    with reported():
        found = preview(*read_change(old, new), image or f"kvferry:{version('kvferry')}")
        click.echo(found.as_json() if as_json else found.as_text())
