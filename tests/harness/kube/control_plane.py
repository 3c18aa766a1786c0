"""Starts etcd, kube-apiserver, kube-controller-manager and kube-scheduler, with their flags."""

import json
import secrets
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from harness.kube import certificates
from harness.kube.api import Api
from harness.kube.assets import Assets
from harness.kube.children import Children

_START_SECONDS = 120.0
_LOOPBACK = "127.0.0.1"
_NAMES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")


@dataclass(frozen=True, slots=True)
class PlaneOptions:
    """Options of a control plane for tests."""

    service_cidr: str = "10.96.0.0/16"
    """Address range of Services. With a range in 127.0.0.0/8, a test can serve a Service's address itself."""
    audit: bool = False
    """Whether the API server writes an audit log to audit.jsonl in the cluster's folder."""


@dataclass(frozen=True, slots=True)
class Place:
    """Addresses and ports of a control plane, and the address ranges of the cluster."""

    address: str
    api_port: int
    etcd_port: int
    peer_port: int
    service_cidr: str
    pod_cidr: str
    bind_address: str = _LOOPBACK
    prefix: tuple[str, ...] = ()
    """Prefix of each command, for example to run it in the node's box."""
    audit: bool = False

    @property
    def url(self) -> str:
        """URL of the API server."""
        return f"https://{self.address}:{self.api_port}"

    @property
    def first_service(self) -> str:
        """IP address of the API server's Service."""
        return self.service_cidr.partition("/")[0].rpartition(".")[0] + ".1"


def loopback(options: PlaneOptions | None = None) -> Place:
    """Return free ports on the loopback interface. Without a node, the cluster's Service addresses are unreachable."""
    with ExitStack() as held:
        made = [held.enter_context(socket.create_server((_LOOPBACK, 0))) for _ in range(3)]
        api, etcd, peer = (one.getsockname()[1] for one in made)
    options = options or PlaneOptions()
    return Place(_LOOPBACK, api, etcd, peer, options.service_cidr, "10.244.0.0/16", audit=options.audit)


def prepare(folder: Path, place: Place, children: Children) -> Api:
    """Write certificates, the administrator's token and the kubeconfig, without starting processes."""
    pki = folder / "pki"
    certificates.make_all(pki, {_LOOPBACK, place.address, place.first_service}, children.clock)
    token = secrets.token_hex(16)
    _private(pki / "tokens.csv", f'{token},admin,admin,"system:masters"\n')
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "kvferry",
        "clusters": [
            {"name": "kvferry", "cluster": {"server": place.url, "certificate-authority": str(pki / "ca.crt")}}
        ],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "kvferry", "context": {"cluster": "kvferry", "user": "admin"}}],
    }
    if place.audit:
        # Only metadata, since bodies may contain secrets. The stage before the response has no additional information.
        policy = {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived"],
            "rules": [{"level": "Metadata"}],
        }
        (folder / "audit-policy.json").write_text(json.dumps(policy), "utf-8")
    _private(folder / "kubeconfig", json.dumps(kubeconfig, indent=1) + "\n")
    return Api(place.url, token, pki / "ca.crt", children.clock)


def start(folder: Path, place: Place, assets: Assets, children: Children) -> None:
    """Start all four processes without waiting; the controller manager and the scheduler wait for the API server."""
    commands = {
        "etcd": etcd_flags(folder, place),
        "kube-apiserver": apiserver_flags(folder, place),
        "kube-controller-manager": controller_manager_flags(folder, place),
        "kube-scheduler": scheduler_flags(folder),
    }
    for name, flags in commands.items():
        children.spawn(name, [*place.prefix, assets.path(name), *flags])


def wait(children: Children, api: Api) -> None:
    """Wait until the API server responds and pods can be created.

    Raises:
        Unavailable: a process exited, or the start timed out.
    """

    def meanwhile() -> None:
        for name in _NAMES:
            children.check(name)

    api.wait("/readyz", seconds=_START_SECONDS, meanwhile=meanwhile)
    # The controller manager creates this account; before that, no pod is admitted.
    api.wait("/api/v1/namespaces/default/serviceaccounts/default", seconds=_START_SECONDS, meanwhile=meanwhile)


def etcd_flags(folder: Path, place: Place) -> list[str]:
    """Return the flags of etcd, which runs without fsync, since the data is discarded."""
    client, peer = f"http://{_LOOPBACK}:{place.etcd_port}", f"http://{_LOOPBACK}:{place.peer_port}"
    return [
        f"--data-dir={folder}/etcd",
        "--unsafe-no-fsync",
        "--log-level=warn",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
    ]


def apiserver_flags(folder: Path, place: Place) -> list[str]:
    """Return the flags of the API server, which runs with the aggregation layer, so that tests can serve additional
    APIs."""
    pki = folder / "pki"
    return [
        f"--etcd-servers=http://{_LOOPBACK}:{place.etcd_port}",
        f"--bind-address={place.bind_address}",
        f"--advertise-address={place.address}",
        f"--secure-port={place.api_port}",
        f"--service-cluster-ip-range={place.service_cidr}",
        f"--tls-cert-file={pki}/api.crt",
        f"--tls-private-key-file={pki}/api.key",
        f"--token-auth-file={pki}/tokens.csv",
        "--authorization-mode=RBAC",
        "--allow-privileged=true",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={pki}/accounts.key",
        f"--service-account-signing-key-file={pki}/accounts.key",
        f"--requestheader-client-ca-file={pki}/front-proxy-ca.crt",
        f"--requestheader-allowed-names={certificates.FRONT_PROXY}",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        f"--proxy-client-cert-file={pki}/front-proxy.crt",
        f"--proxy-client-key-file={pki}/front-proxy.key",
        "--kubelet-preferred-address-types=InternalIP",
        "--enable-priority-and-fairness=false",
        "--profiling=false",
        *(
            (f"--audit-policy-file={folder}/audit-policy.json", f"--audit-log-path={folder}/audit.jsonl")
            if place.audit
            else ()
        ),
    ]


def controller_manager_flags(folder: Path, place: Place) -> list[str]:
    """Return the flags of the controller manager, whose autoscalers sync every two seconds and whose rate limits are
    raised."""
    pki = folder / "pki"
    return [
        *scheduler_flags(folder),
        f"--root-ca-file={pki}/ca.crt",
        f"--service-account-private-key-file={pki}/accounts.key",
        f"--cluster-cidr={place.pod_cidr}",
        "--allocate-node-cidrs=true",
        "--node-cidr-mask-size=24",
        "--horizontal-pod-autoscaler-sync-period=2s",
    ]


def scheduler_flags(folder: Path) -> list[str]:
    """Return the flags of the scheduler, which runs as a single instance without leader election."""
    return [
        f"--kubeconfig={folder}/kubeconfig",
        "--leader-elect=false",
        "--secure-port=0",
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
        "--profiling=false",
    ]


def _private(path: Path, text: str) -> None:
    path.touch(0o600)
    path.write_text(text, "utf-8")
