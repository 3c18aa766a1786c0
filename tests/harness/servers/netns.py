"""A network namespace for a process. Its link to the host can be slowed down, cut, or set to drop packets."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

_SECONDS = 20.0


def why_not() -> str:
    """Return the reason why this machine cannot create network namespaces; empty if it can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} missing; install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with joined():
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.decode('utf-8', 'replace').strip()}"


@dataclass(frozen=True, slots=True)
class Link:
    """A veth pair with one interface on the host and the other in the namespace."""

    namespace: str
    near: str
    """Name of the interface on the host."""
    far: str
    """Name of the interface in the namespace."""
    near_address: str
    far_address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """Command prefix that runs a command in the namespace, with the same PID."""
        return ("ip", "netns", "exec", self.namespace)

    def shape(self, megabits: float) -> None:
        """Limit the rate to `megabits` Mbit/s in each direction, with a queue of 50 ms."""
        burst = max(4, round(0.6 * megabits))  # kB: a few packets, plus the bytes between two kernel ticks
        limits = ("root", "tbf", "rate", f"{round(megabits * 1000)}kbit", "burst", f"{burst}kb", "latency", "50ms")
        self._both_ends(*limits)

    def lose_everything(self) -> None:
        """Drop all packets; the interfaces stay up."""
        self._both_ends(
            "root", "pfifo", "limit", "0"
        )  # a queue without capacity is used, since not every kernel has netem

    def down(self) -> None:
        """Set the host's interface down; depending on the kernel, senders get an error or wait."""
        _do("ip", "link", "set", self.near, "down")

    def up(self) -> None:
        """Set the host's interface up after `down`."""
        _do("ip", "link", "set", self.near, "up")

    def _both_ends(self, *discipline: str) -> None:
        _do("tc", "qdisc", "replace", "dev", self.near, *discipline)
        _do(*self.prefix, "tc", "qdisc", "replace", "dev", self.far, *discipline)


@contextmanager
def joined() -> Iterator[Link]:
    """Create a namespace and a link to it; yield the link; remove both at the end of the `with` block.

    Raises:
        subprocess.CalledProcessError: the namespace cannot be created on this machine.
    """
    pid = os.getpid()
    # A network of four addresses in 10.192.0.0/10, distinct for each process.
    number = pid % (1 << 20)
    network = f"10.{192 + (number >> 14)}.{(number >> 6) & 255}"
    first = (number & 63) * 4
    link = Link(f"kvferry-{pid}", f"kva{pid}", f"kvb{pid}", f"{network}.{first + 1}", f"{network}.{first + 2}")
    try:
        _do("ip", "netns", "add", link.namespace)
        _do("ip", "link", "add", link.near, "type", "veth", "peer", "name", link.far, "netns", link.namespace)
        _do("ip", "address", "add", f"{link.near_address}/30", "dev", link.near)
        _do("ip", "link", "set", link.near, "up")
        inside = ("ip", "-n", link.namespace)
        _do(*inside, "address", "add", f"{link.far_address}/30", "dev", link.far)
        _do(*inside, "link", "set", link.far, "up")
        _do(*inside, "link", "set", "lo", "up")
        yield link
    finally:
        for end in (("ip", "link", "del", link.near), ("ip", "netns", "del", link.namespace)):
            with suppress(subprocess.CalledProcessError):  # if it was not created
                _do(*end)


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=_SECONDS)
