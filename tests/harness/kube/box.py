"""The node's sandbox: separate namespaces with a network link to the host. Killing its init process kills all processes
in it."""

import os
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from harness.kube.cgroups import Cgroups
from harness.kube.children import BoxState, Children, Process, kill, log_tail, start_of, wait_gone
from harness.kube.control_plane import Place
from kvferry.core.errors import Unavailable

_CALL_SECONDS = 60.0
_START_SECONDS = 30.0
MOST_BOXES = 40
_TOOLS = ("ip", "unshare", "nsenter", "setpriv", "mount", "sysctl", "nft", "conntrack", "containerd", "ctr", "runc")

# kubelet requires these values and would write them; inside the box, each is a bind-mounted file.
_SYSCTLS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000,
    "kernel/keys/root_maxbytes": 25_000_000,
}
CNI_BINARIES = Path("/usr/lib/cni")
MODELS = "/var/lib/kvferry/models"
"""Folder of the node with model files, for pools that use it as their cache."""
_INIT = "import os, time\nwhile True:\n  try: os.wait()\n  except ChildProcessError: time.sleep(0.2)\n"


@dataclass(frozen=True, slots=True)
class Box:
    """Names and addresses of a box, all derived from the number of the box."""

    number: int
    inner: int = 0
    """PID of the box's init process in the host's PID namespace; 0 if it is not running."""

    @property
    def name(self) -> str:
        return f"kvnode{self.number}"

    @property
    def near(self) -> str:
        """Name of the link's interface on the host."""
        return f"kvn{self.number}h"

    @property
    def near_address(self) -> str:
        return f"10.190.{self.number}.1"

    @property
    def address(self) -> str:
        """The node's IP address."""
        return f"10.190.{self.number}.2"

    @property
    def pod_cidr(self) -> str:
        return f"10.{110 + self.number}.0.0/24"

    @property
    def service_cidr(self) -> str:
        return f"10.{110 + self.number}.96.0/24"

    @property
    def cgroups(self) -> Cgroups:
        return Cgroups(self.name)

    @property
    def enter(self) -> tuple[str, ...]:
        """Command prefix that runs a command inside the box."""
        return ("nsenter", "-t", str(self.inner), "-m", "-n", "-p", "-u", "-i", "-C", "--")

    @property
    def place(self) -> Place:
        """Addresses of a control plane inside the box that the node and its pods can reach."""
        ports = (6443, 2379, 2380)
        return Place(self.address, *ports, self.service_cidr, self.pod_cidr, "0.0.0.0", self.enter)

    def run(self, *words: object, seconds: float = _CALL_SECONDS) -> str:
        """Run a command inside the box and return its output.

        Raises:
            Unavailable: the command failed or timed out.
        """
        return run(*self.enter, *words, seconds=seconds)


def why_not(cni: Path = CNI_BINARIES) -> str:
    """Return the reason why this machine cannot run a node; empty if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a node needs root on Linux"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    missing += [
        str(cni / plugin) for plugin in ("bridge", "host-local", "loopback", "portmap") if not (cni / plugin).exists()
    ]
    if missing:
        return f"no {', '.join(missing)}; `make test-cluster` installs them where it can"
    try:
        run("unshare", "-n", "nft", "add", "table", "ip", "kvferry")
    except Unavailable as error:
        return f"no netfilter in a namespace here: {error}"
    return ""


def start(folder: Path, children: Children) -> Box:
    """Start a box; return it when it is reachable.

    Raises:
        Unavailable: the box cannot be created on this machine.
    """
    box = _claim()
    # Record the box first, so that `stop` can remove it if a later step fails.
    children.state.box = BoxState(box.number)
    children.state.write(folder)
    script = folder / "box.sh"
    script.write_text(_script(folder, box), "utf-8")
    unshare = ("unshare", "-m", "-n", "-p", "-u", "-i", "-C", "--fork", "--kill-child", "--propagation", "private")
    outer = children.spawn("box", [*box.cgroups.entering(inner=False), *unshare, "sh", script])
    _wait_ready(folder, children)
    inner = int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()[0])
    children.state.box = BoxState(box.number, Process(inner, start_of(inner) or 0))
    children.state.write(folder)
    box = Box(box.number, inner)
    _link(box)
    return box


def stop(state: BoxState, children: Children) -> None:
    """Kill all processes of the box, then remove its interfaces and cgroups.

    Raises:
        Unavailable: a process or a cgroup cannot be removed.
    """
    box = Box(state.number)
    if state.inner is not None:
        kill(state.inner)
        wait_gone(state.inner, "the node's first process", children.clock)
    children.end_all()
    subprocess.run(["ip", "link", "del", box.near], capture_output=True, timeout=_CALL_SECONDS, check=False)
    box.cgroups.remove(children.clock)


def run(*words: object, seconds: float = _CALL_SECONDS) -> str:
    """Run a command on the host and return its output.

    Raises:
        Unavailable: the command failed or timed out.
    """
    command = list(map(str, words))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"`{' '.join(command)}` has not ended after {seconds:.0f} s") from None
    if done.returncode:
        raise Unavailable(
            f"`{' '.join(command)}` failed with {done.returncode}: {(done.stderr or done.stdout).strip()}"
        )
    return done.stdout


def _claim() -> Box:
    """Reserve the first free box number by creating its cgroup, which can succeed in only one process."""
    for number in range(1, MOST_BOXES + 1):
        box = Box(number)
        if not Path("/sys/class/net", box.near).exists() and box.cgroups.claim():
            return box
    raise Unavailable(f"{MOST_BOXES} nodes run on this machine already; stop one with `python -m harness.kube down`")


def _wait_ready(folder: Path, children: Children) -> None:
    pause = threading.Event()
    deadline = children.clock.monotonic() + _START_SECONDS
    while not (folder / "box.ready").exists():
        children.check("box")
        if children.clock.monotonic() > deadline:
            raise Unavailable(f"the box was not ready in {_START_SECONDS:.0f} s:\n{log_tail(folder, 'box')}")
        pause.wait(0.02)


def _link(box: Box) -> None:
    far = f"kvn{box.number}b"
    run("ip", "link", "add", box.near, "type", "veth", "peer", "name", far, "netns", box.inner)
    run("ip", "address", "add", f"{box.near_address}/30", "dev", box.near)
    run("ip", "link", "set", box.near, "up")
    box.run("ip", "link", "set", far, "name", "eth0")
    box.run("ip", "address", "add", f"{box.address}/30", "dev", "eth0")
    box.run("ip", "link", "set", "eth0", "up")
    box.run("ip", "route", "add", "default", "via", box.near_address)
    box.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
    for cidr in (box.pod_cidr, box.service_cidr):  # the host reaches pods and services through the node
        run("ip", "route", "add", cidr, "via", box.address)


def _script(folder: Path, box: Box) -> str:
    """Return the shell script for the init process, which afterwards reaps orphaned processes."""
    places = {"/var/log": "log", "/var/lib/cni": "cni-state", "/var/lib/kubelet": "kubelet-state", MODELS: "models"}
    lines = ["set -eu", "mount --make-rprivate /", "mount -t proc proc /proc", "mount -t sysfs sysfs /sys"]
    lines += box.cgroups.mounting()
    lines += ["mount -t tmpfs tmpfs /run", "mkdir -p /run/netns /run/lock"]
    for seen, kept in places.items():  # paths that are hard-coded in the node's programs
        (folder / kept).mkdir(exist_ok=True)
        lines += [f"mkdir -p {seen}", f"mount --bind '{folder}/{kept}' {seen}"]
    (folder / "sysctl").mkdir()
    for name, value in _SYSCTLS.items():
        file = folder / "sysctl" / name.replace("/", "_")
        file.write_text(f"{value}\n")
        lines.append(f"mount --bind '{file}' /proc/sys/{name}")
    lines += [f"hostname {box.name}", "ip link set lo up", f"echo ready > '{folder}/box.ready'"]
    lines.append(f"exec {sys.executable} -c '{_INIT}'")
    return "\n".join(lines) + "\n"


def attached(state: BoxState) -> Box:
    """Return the box that a different process has started."""
    if state.inner is None:
        raise Unavailable(f"node {state.number} has not started")
    return Box(state.number, state.inner.pid)
