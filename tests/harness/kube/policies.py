"""Enforces NetworkPolicies on a test cluster's node with kube-router, by iptables and sets of addresses.

kube-network-policies, which is smaller, queues packets by nftables; the kernels of many test machines lack that.
"""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.go_binary import go_binary
from harness.kube.box import Box
from harness.kube.cluster import Cluster

_BUILD = Path(__file__).parent / "policies_build"
_PACKAGE = "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router"
_NAME = "kube-router"
_TOOLS = ("ipset", "iptables", "iptables-save", "iptables-restore")
_STOP_SECONDS = 20.0


def why_not() -> str:
    """Return the reason why this machine cannot enforce policies; empty if it can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"no {', '.join(missing)}; `make test-policies` installs them where it can" if missing else ""


@contextmanager
def enforced(cluster: Cluster, folder: Path) -> Iterator[None]:
    """Run kube-router on the cluster's node for the `with` block; the first use builds it, which takes minutes.

    Policies are enforced some seconds after the beginning of the block, and not after its end.

    Args:
        cluster: a cluster with a node.
        folder: an empty folder for the log.
    """
    box = cluster.box
    words = [
        go_binary(_BUILD, _NAME, _PACKAGE),
        f"--kubeconfig={cluster.kubeconfig}",
        f"--hostname-override={box.name}",
        "--run-firewall=true",
        "--run-router=false",
        "--run-service-proxy=false",
        "--run-loadbalancer=false",
        "--enable-cni=false",
        "--health-port=0",
        "--metrics-port=0",
        f"--service-cluster-ip-range={box.service_cidr}",
        "--iptables-sync-period=5s",
    ]
    with (folder / "log").open("wb") as log:
        entering = [*box.cgroups.entering(inner=True), *box.enter]
        process = subprocess.Popen([*map(str, entering), *map(str, words)], stdout=log, stderr=log)
        try:
            yield
        except BaseException:
            print((folder / "log").read_text("utf-8", "replace")[-3000:])
            raise
        finally:
            _stop(box, process)


def _stop(box: Box, process: subprocess.Popen[bytes]) -> None:
    # nsenter does not pass signals on to the process that it has started in the box.
    subprocess.run([*box.enter, "pkill", "-x", _NAME], timeout=_STOP_SECONDS, check=False)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        subprocess.run([*box.enter, "pkill", "-KILL", "-x", _NAME], timeout=_STOP_SECONDS, check=False)
        process.wait(_STOP_SECONDS)
    for words in (("iptables", "-F"), ("iptables", "-X"), ("ipset", "destroy")):
        subprocess.run([*box.enter, *words], capture_output=True, timeout=_STOP_SECONDS, check=False)
