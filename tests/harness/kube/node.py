"""Starts a node's processes in its box: containerd, kubelet, kube-proxy and a DNS server."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.kube import runtime
from harness.kube.api import Api
from harness.kube.assets import Assets
from harness.kube.box import Box
from harness.kube.children import Children
from harness.kube.image import Image, file_entry, write_archive
from harness.kube.runtime import Runtime

_READY_SECONDS = 120.0
_PODS = 110


def start_runtime(folder: Path, box: Box, assets: Assets, children: Children, host_folders: Sequence[Path]) -> Runtime:
    """Start containerd and import the pause image; does not need the API server."""
    made = runtime.start(folder, box, children, host_folders)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        archive = Path(scratch) / "pause.tar"
        layer = [file_entry("pause", assets.path("pause"))]
        write_archive(archive, Image(runtime.PAUSE_IMAGE, ["/pause"], user="65535"), [layer])
        made.load(archive)
    return made


def start(folder: Path, box: Box, assets: Assets, children: Children, api: Api) -> None:
    """Start the remaining processes and wait until the node accepts pods.

    Raises:
        Unavailable: a process exited, or the start timed out.
    """
    (folder / "resolv.conf").touch()
    _write(folder / "kubelet.json", kubelet_settings(folder, box))
    _write(folder / "kube-proxy.json", proxy_settings(folder, box))
    (folder / "Corefile").write_text(corefile(folder, box), "utf-8")
    kubelet = [
        assets.path("kubelet"),
        f"--config={folder}/kubelet.json",
        f"--kubeconfig={folder}/kubeconfig",
        f"--root-dir={folder}/kubelet",
        f"--cert-dir={folder}/pki/kubelet",
        f"--hostname-override={box.name}",
        f"--node-ip={box.address}",
    ]
    commands = {
        "kubelet": kubelet,
        "kube-proxy": [assets.path("kube-proxy"), f"--config={folder}/kube-proxy.json"],
        "coredns": [assets.path("coredns"), "-conf", folder / "Corefile"],
    }
    for name, words in commands.items():
        children.spawn(name, [*box.cgroups.entering(inner=True), *box.enter, *words])

    def meanwhile() -> None:
        for name in ("containerd", *commands):
            children.check(name)

    api.wait(f"/api/v1/nodes/{box.name}", _takes_pods, seconds=_READY_SECONDS, meanwhile=meanwhile)


def kubelet_settings(folder: Path, box: Box) -> dict[str, object]:
    """Return kubelet's configuration: without evictions, image garbage collection and authentication, since only this
    machine can reach it."""
    never = dict.fromkeys(
        ("memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available", "imagefs.inodesFree"), "0%"
    )
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "0.0.0.0",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "containerRuntimeEndpoint": f"unix://{runtime.SOCKET}",
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,  # lowering it would require CAP_SYS_RESOURCE
        "clusterDNS": [box.address],
        "clusterDomain": "cluster.local",
        "resolvConf": f"{folder}/resolv.conf",
        "evictionHard": never,
        "evictionPressureTransitionPeriod": "0s",
        "imageGCHighThresholdPercent": 100,
        "localStorageCapacityIsolation": False,
        "maxPods": _PODS,
        "syncFrequency": "2s",
        "nodeStatusUpdateFrequency": "2s",
        "serializeImagePulls": False,
        "registryPullQPS": 0,
    }


def proxy_settings(folder: Path, box: Box) -> dict[str, object]:
    """Return kube-proxy's configuration, with nftables in the box's network namespace."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": f"{folder}/kubeconfig"},
        "mode": "nftables",
        "clusterCIDR": box.pod_cidr,
        "hostnameOverride": box.name,
        "oomScoreAdj": 0,
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "nftables": {"minSyncPeriod": "100ms"},
    }


def corefile(folder: Path, box: Box) -> str:
    """Return the configuration of the DNS server, which is a process on the node; its TTL is 1 s, because tests change
    the records."""
    return f""".:53 {{
    bind {box.address}
    errors
    ready 127.0.0.1:8181
    cache 2
    loadbalance
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {folder}/kubeconfig kvferry
        ttl 1
    }}
}}
"""


def runtime_class() -> dict[str, object]:
    """Return the RuntimeClass object for the runtime `host`."""
    return {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": runtime.HOST_RUNTIME},
        "handler": runtime.HOST_RUNTIME,
    }


def _takes_pods(node: Any) -> bool:
    conditions = {one["type"]: one["status"] for one in node["status"].get("conditions", [])}
    return conditions.get("Ready") == "True" and not node["spec"].get("taints")


def _write(path: Path, settings: dict[str, object]) -> None:
    path.write_text(json.dumps(settings, indent=1) + "\n", "utf-8")  # JSON is valid YAML
