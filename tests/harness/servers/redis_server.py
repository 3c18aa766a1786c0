"""A real `redis-server` for tests and benchmarks, with its own port and Unix socket and without persistence.

The program must be on PATH; otherwise tests that need it fail with installation instructions.
"""

import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from kvferry.core.clock import SystemClock
from kvferry.kv.tiers.redis.redis_client import ConnectionLost, ServerError, Wire, command

REMEDY = "redis-server is not on PATH; `make setup` installs it for root, else: apt-get install redis-server"
ALL_SLOTS = (0, 16383)
_START_SECONDS = 20.0
_END_SECONDS = 10.0


@dataclass(slots=True)
class RedisServer:
    """A running `redis-server` process."""

    process: subprocess.Popen[bytes]
    port: int
    socket_path: Path
    folder: Path
    scheme: str = "redis"
    address: str = "127.0.0.1"

    @property
    def tcp(self) -> str:
        """URL over TCP, without options."""
        return f"{self.scheme}://{self.address}:{self.port}"

    @property
    def unix(self) -> str:
        """URL over the Unix socket."""
        return f"redis+unix://{self.socket_path}"

    @property
    def cacert(self) -> Path:
        """Path of the CA certificate of a server with TLS."""
        return self.folder / "ca.pem"

    def ask(self, *words: bytes, user: tuple[str, str] | None = None) -> object:
        """Send a command over the Unix socket and return the reply.

        Raises:
            ServerError: the server replied with an error.
        """
        clock = SystemClock()
        deadline = clock.monotonic() + _START_SECONDS
        with socket.socket(socket.AF_UNIX) as made:
            made.connect(str(self.socket_path))
            wire = Wire(made, clock)
            if user is not None:
                wire.send([command(b"AUTH", user[0].encode(), user[1].encode())], deadline)
                wire.reply(deadline)
            wire.send([command(*words)], deadline)
            return wire.reply(deadline)

    def ask_whole(self, *words: bytes) -> bytes | None:
        """Send a command whose reply may be a long value, and return the reply; `None` for a null reply."""
        clock = SystemClock()
        deadline = clock.monotonic() + _START_SECONDS
        with socket.socket(socket.AF_UNIX) as made:
            made.connect(str(self.socket_path))
            wire = Wire(made, clock)
            wire.send([command(*words)], deadline)
            length = wire.number(wire.line(deadline).removeprefix(b"$"))
            if length < 0:
                return None
            whole = bytearray(length)
            at = len(first := wire.take(length))
            whole[:at] = first
            while at < length:
                at += wire.read_into([memoryview(whole)[at:]], deadline)
            return bytes(whole)

    def kill(self) -> None:
        """Kill the server, as in a crash."""
        self.process.kill()
        self.process.wait(_END_SECONDS)


def free_port() -> int:
    """Return a free TCP port, low enough that the cluster bus port (port + 10000) is valid."""
    for _ in range(100):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            if port < 55000:
                return port
    raise AssertionError("no free port below 55000")


@contextmanager
def redis_server(
    *,
    maxmemory: str = "1gb",
    policy: str = "allkeys-lru",
    acl: Sequence[str] = (),
    tls: bool = False,
    cluster: bool = False,
    slots: tuple[int, int] = ALL_SLOTS,
    port: int | None = None,
    address: str = "127.0.0.1",
) -> Iterator[RedisServer]:
    """Start a server and yield it; stop it at the end of the `with` block.

    Args:
        acl: users as ACL rules (`default off`, `worker on >secret ...`).
        tls: whether the TCP port uses TLS, with a certificate of a new authority; the Unix socket does not.
        cluster: whether to enable cluster mode.
        slots: first and last hash slot of the server; with all slots, wait until the cluster is ready.
        port: the TCP port, for example to restart after a crash; `None` selects a free port.
        address: listening address, for example one that pods can reach; then require a password (`acl`).

    Raises:
        AssertionError: redis-server is not installed or does not start.
    """
    binary = shutil.which("redis-server")
    assert binary is not None, REMEDY
    folder = Path(
        tempfile.mkdtemp(prefix="kv-redis-")
    )  # a short path, since paths of Unix sockets are limited to 107 bytes
    port = port or free_port()
    settings = {
        "bind": address,
        "port": "0" if tls else str(port),
        "unixsocket": str(folder / "s"),
        "dir": str(folder),
        "save": '""',
        "appendonly": "no",
        "maxmemory": maxmemory,
        "maxmemory-policy": policy,
        "loglevel": "warning",
    }
    if tls:
        _make_certificates(folder)
        settings |= {
            "tls-port": str(port),
            "tls-cert-file": str(folder / "server.pem"),
            "tls-key-file": str(folder / "server.key"),
            "tls-ca-cert-file": str(folder / "ca.pem"),
            "tls-auth-clients": "no",
        }
    if cluster:
        settings |= {"cluster-enabled": "yes", "cluster-config-file": str(folder / "nodes.conf")}
    lines = [f"{name} {value}" for name, value in settings.items()] + [f"user {rule}" for rule in acl]
    (folder / "redis.conf").write_text("\n".join(lines) + "\n", "utf-8")
    process = subprocess.Popen(
        [binary, str(folder / "redis.conf")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder
    )
    server = RedisServer(process, port, folder / "s", folder, "rediss" if tls else "redis", address)
    try:
        _wait(server, slots if cluster else None)
        yield server
    finally:
        process.kill()
        process.wait(_END_SECONDS)
        if process.stdout is not None:
            process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


def _wait(server: RedisServer, slots: tuple[int, int] | None) -> None:
    clock, pause = SystemClock(), threading.Event()
    deadline = clock.monotonic() + _START_SECONDS
    if_refused: object = None
    has_slots = slots is None
    while clock.monotonic() < deadline:
        if server.process.poll() is not None:
            output = server.process.stdout.read(4096) if server.process.stdout is not None else b""
            raise AssertionError(f"redis-server exited: {output.decode('utf-8', 'replace')}")
        try:
            server.ask(b"PING")
            if not has_slots and slots is not None:
                server.ask(b"CLUSTER", b"ADDSLOTSRANGE", *(b"%d" % slot for slot in slots))
                has_slots = True
            if slots != ALL_SLOTS or b"cluster_state:ok" in bytes(server.ask(b"CLUSTER", b"INFO")):  # type: ignore[call-overload]
                return
        except ServerError as error:
            if error.code in ("NOAUTH", "NOPERM"):
                return  # the server responds; permissions are the test's responsibility
            if_refused = error
        except (OSError, ConnectionLost) as error:
            if_refused = error
        pause.wait(0.01)
    raise AssertionError(f"redis-server did not answer within {_START_SECONDS:.0f} s: {if_refused}")


def _make_certificates(folder: Path) -> None:
    """Create a CA and a certificate for 127.0.0.1, both valid for one day."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    now = datetime.fromtimestamp(SystemClock().wall(), UTC)

    def builder(subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        made = x509.CertificateBuilder().subject_name(name(subject)).issuer_name(name("kvferry tests"))
        made = made.public_key(key.public_key()).serial_number(x509.random_serial_number())
        return made.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=1))

    authority_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_key_id = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    authority = (
        builder("kvferry tests", authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(ca_key_id, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    server = (
        builder("redis", server_key)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(ca_key_id), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "ca.pem").write_bytes(authority.public_bytes(pem))
    (folder / "server.pem").write_bytes(server.public_bytes(pem))
    (folder / "server.key").write_bytes(
        server_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
