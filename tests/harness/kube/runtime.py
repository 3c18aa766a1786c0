"""Runs containerd in the node's box. Containers with its runtime `host` can access folders of the host."""

import json
import shutil
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.kube.box import CNI_BINARIES, Box, run
from harness.kube.children import Children, log_tail
from kvferry.core.errors import Unavailable

SOCKET = "/run/containerd/containerd.sock"

PAUSE_IMAGE = "localhost/pause:1"
HOST_RUNTIME = "host"
_START_SECONDS = 60.0
_LOAD_SECONDS = 900.0
_UNUSED = (
    "io.containerd.internal.v1.opt",
    "io.containerd.internal.v1.tracing",
    "io.containerd.nri.v1.nri",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.zfs",
    "io.containerd.tracing.processor.v1.otlp",
)


_RUNC_FOR_HOST = """#!{python} -IS
import json, os, sys
arguments = sys.argv[1:]
if "create" in arguments and "--bundle" in arguments:
    path = os.path.join(arguments[arguments.index("--bundle") + 1], "config.json")
    with open(path) as file:
        spec = json.load(file)
    spec["mounts"].sort(key=lambda mount: mount["destination"].rstrip("/").count("/"))
    with open(path, "w") as file:
        json.dump(spec, file)
os.execv("{runc}", ["{runc}", *arguments])
"""
"""Program of the runtime `host`: runc, with every folder mounted after its parents. containerd appends a pod's volumes
to the mounts of the base specification, so that a volume at /tmp would hide a checkout below /tmp."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """The containerd process of a node."""

    box: Box

    def ctr(self, *words: object, seconds: float) -> str:
        """Run `ctr` in containerd's Kubernetes namespace and return its output."""
        return self.box.run("ctr", "-a", SOCKET, "-n", "k8s.io", *words, seconds=seconds)

    def load(self, archive: Path) -> None:
        """Import an OCI archive, without accessing a registry."""
        self.ctr("images", "import", archive.resolve(), seconds=_LOAD_SECONDS)


def start(folder: Path, box: Box, children: Children, host_folders: Sequence[Path]) -> Runtime:
    """Start containerd and wait until it responds.

    Raises:
        Unavailable: containerd exited, or the start timed out.
    """
    (folder / "cni.d").mkdir()
    (folder / "cni.d" / "10-bridge.conflist").write_text(json.dumps(network(box), indent=1), "utf-8")
    runc = shutil.which("runc") or "runc"
    runtimes: dict[str, tuple[str, Path | None]] = {"runc": (runc, None)}
    if host_folders:
        spec, program = folder / "host-spec.json", folder / "runc-host"
        spec.write_text(json.dumps(host_spec(json.loads(run("ctr", "oci", "spec")), host_folders)), "utf-8")
        program.write_text(_RUNC_FOR_HOST.format(python=sys.executable, runc=runc), "utf-8")
        program.chmod(0o755)
        runtimes[HOST_RUNTIME] = (str(program), spec)
    second = " v2." in run("containerd", "--version")
    settings = folder / "containerd.toml"
    settings.write_text(containerd_settings(folder, runtimes, second=second), "utf-8")
    children.spawn("containerd", [*box.cgroups.entering(inner=True), *box.enter, "containerd", "-c", settings])
    pause = threading.Event()
    deadline = children.clock.monotonic() + _START_SECONDS
    while True:
        children.check("containerd")
        try:
            box.run("ctr", "-a", SOCKET, "version")
            return Runtime(box)
        except Unavailable:
            if children.clock.monotonic() > deadline:
                tail = log_tail(folder, "containerd")
                raise Unavailable(f"containerd does not answer after {_START_SECONDS:.0f} s:\n{tail}") from None
        pause.wait(0.05)


def network(box: Box) -> dict[str, object]:
    """Return the CNI configuration: pods on a bridge with addresses of the node's range, without masquerading, so that
    the host can reply to them."""
    gateway = box.pod_cidr.partition("/")[0].rpartition(".")[0] + ".1"
    ranges = [[{"subnet": box.pod_cidr, "gateway": gateway}]]
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": "/var/lib/cni/networks",
            "ranges": ranges,
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": "kvferry", "plugins": [bridge, ports]}


def containerd_settings(folder: Path, runtimes: Mapping[str, tuple[str, Path | None]], *, second: bool) -> str:
    """Return containerd's configuration file for major version 1, or 2 if `second`; the two use different names.

    Args:
        runtimes: program and base specification of each runtime; without a specification, containerd's own is used.

    A process without CAP_SYS_RESOURCE cannot lower its out-of-memory score, therefore `restrict_oom_score_adj` is set.
    """
    cri = "io.containerd.cri.v1.runtime" if second else "io.containerd.grpc.v1.cri"
    lines = [
        f"version = {3 if second else 2}",
        f'root = "{folder}/containerd"',
        'state = "/run/containerd"',
        f"disabled_plugins = {json.dumps(_UNUSED)}",
        "[grpc]",
        f'  address = "{SOCKET}"',
    ]
    if second:
        lines += ['[plugins."io.containerd.cri.v1.images".pinned_images]', f'  sandbox = "{PAUSE_IMAGE}"']
    lines += [f'[plugins."{cri}"]', "  restrict_oom_score_adj = true"]
    if not second:
        lines.append(f'  sandbox_image = "{PAUSE_IMAGE}"')
    lines += [f'[plugins."{cri}".cni]', f'  bin_dir = "{CNI_BINARIES}"', f'  conf_dir = "{folder}/cni.d"']
    for name, (program, spec) in runtimes.items():
        lines += [f'[plugins."{cri}".containerd.runtimes.{name}]', '  runtime_type = "io.containerd.runc.v2"']
        if spec is not None:
            lines.append(f'  base_runtime_spec = "{spec}"')
        lines += [
            f'[plugins."{cri}".containerd.runtimes.{name}.options]',
            f'  BinaryName = "{program}"',
            "  SystemdCgroup = false",
        ]
    return "\n".join(lines) + "\n"


def host_spec(plain: dict[str, list[dict[str, object]]], folders: Iterable[Path]) -> dict[str, list[dict[str, object]]]:
    """Add read-only bind mounts of host folders to an OCI runtime specification; each folder has the same path in the
    container."""
    mounts = [mount for mount in plain["mounts"] if mount["destination"] != "/run"]
    binds: list[dict[str, object]] = [
        {"destination": str(one), "type": "bind", "source": str(one), "options": ["rbind", "ro"]} for one in folders
    ]
    return {**plain, "mounts": mounts + binds}
