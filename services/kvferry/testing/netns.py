"""A network namespace for a process, joined to this one by a link that can be slowed, cut, or made to lose packets."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

_SECONDS = 20.0


def why_not() -> str:
    """Why there can be no namespace here; empty: there can."""
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
    """A pair of ends: one here, one in the namespace."""

    namespace: str
    near: str
    """Interface here."""
    far: str
    """Interface in the namespace."""
    near_address: str
    far_address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """Before a command's words: it runs in the namespace, as the same process."""
        return ("ip", "netns", "exec", self.namespace)

    def shape(self, megabits: float) -> None:
        """At most so many million bits a second, each way; a queue of a twentieth of a second."""
        burst = max(4, round(0.6 * megabits))  # kB: a few packets, and what falls due between two ticks of the kernel
        limits = ("root", "tbf", "rate", f"{round(megabits * 1000)}kbit", "burst", f"{burst}kb", "latency", "50ms")
        self._both_ends(*limits)

    def lose_everything(self) -> None:
        """The interfaces stay up, and nothing arrives."""
        self._both_ends("root", "pfifo", "limit", "0")  # a queue of no packets; not every kernel has netem

    def down(self) -> None:
        """The end here is down: whoever sends is told at once, or waits, as the kernel likes."""
        _do("ip", "link", "set", self.near, "down")

    def up(self) -> None:
        """After `down`."""
        _do("ip", "link", "set", self.near, "up")

    def _both_ends(self, *discipline: str) -> None:
        _do("tc", "qdisc", "replace", "dev", self.near, *discipline)
        _do(*self.prefix, "tc", "qdisc", "replace", "dev", self.far, *discipline)


@contextmanager
def joined() -> Iterator[Link]:
    """A namespace and a link to it until the block ends.

    Raises:
        subprocess.CalledProcessError: it may not be made here.
    """
    pid = os.getpid()
    # A network of four addresses in 10.192.0.0/10, a different one for each process that does this.
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
            with suppress(subprocess.CalledProcessError):  # it was never made
                _do(*end)


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=_SECONDS)
