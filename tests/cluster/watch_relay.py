"""A relay between a client (plain HTTP) and the API server that can withhold the watch events of one kind, or cut its
watches and expire their resource version."""

import json
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

_GONE = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
    b'{"type": "ERROR", "object": {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", '
    b'"message": "too old resource version", "code": 410}}\n'
)
"""Answer of the API server to a watch from a resource version that it no longer has."""


class WatchRelay:
    """Relays bytes both ways; watches of a stalled kind stay open and get no bytes."""

    def __init__(self, kubeconfig: Path) -> None:
        self._config = json.loads(kubeconfig.read_text())
        there = self._config["clusters"][0]["cluster"]
        split = urlsplit(there["server"])
        self._server = (split.hostname or "", split.port or 443)
        self._tls = ssl.create_default_context(cafile=there["certificate-authority"])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self.stalled = ""
        """Plural of the kind whose watches get no bytes."""
        self._cut = ""
        self._expired = ""
        """Plural of the kind whose next watch is answered with 410 Gone."""
        self._watches: dict[socket.socket, str] = {}
        """Plural of the kind that each connection of a client watches."""
        self._threads[0].start()

    def write_kubeconfig(self, path: Path) -> Path:
        """Write and return a kubeconfig whose server is the relay."""
        server = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        path.write_text(json.dumps({**self._config, "clusters": [{"name": "kvferry", "cluster": {"server": server}}]}))
        return path

    def num_watches(self, plural: str) -> int:
        """Return the number of open watches of a kind."""
        return sum(kind == plural for kind in list(self._watches.values()))

    @contextmanager
    def gap(self, plural: str) -> Iterator[None]:
        """End the watches of a kind, and refuse new ones until the context ends. The next watch of the kind is then
        answered with 410 Gone, as after a gap in which the API server has compacted its history."""
        self._cut = plural
        self._end(*(client for client, kind in list(self._watches.items()) if kind == plural))
        try:
            yield
        finally:
            self._expired, self._cut = plural, ""

    def close(self) -> None:
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._open.append(client)
                self._threads.append(threading.Thread(target=self._serve, args=(client,)))
                self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        try:
            raw = socket.create_connection(self._server, timeout=10)
            server = self._tls.wrap_socket(raw, server_hostname=self._server[0])
            server.setblocking(False)  # received bytes may belong to TLS itself, with no data to read
        except OSError:
            return self._end(client)
        self._open.append(server)
        return self._carry(client, server)

    def _carry(self, client: socket.socket, server: ssl.SSLSocket) -> None:
        """Relay both directions in one thread, because two threads must not use a TLS connection at the same time."""
        watched = ""
        with suppress(OSError, ValueError):
            while True:
                ready = [server] if server.pending() else select.select([client, server], [], [])[0]
                for source in ready:
                    try:
                        data = source.recv(1 << 16)
                    except ssl.SSLWantReadError:
                        continue
                    if not data:
                        return self._end(client, server)
                    if source is client:
                        line = data.partition(b"\r\n")[0].decode(errors="replace")
                        watched = line.partition("?")[0].rpartition("/")[2] if "watch=true" in line else ""
                        self._watches[client] = watched
                        if watched and watched == self._cut:
                            return self._end(client, server)
                        if watched and watched == self._expired:
                            self._expired = ""
                            client.sendall(_GONE)
                            return self._end(client, server)
                        server.setblocking(True)
                        server.sendall(data)
                        server.setblocking(False)
                    elif not watched or watched != self.stalled:
                        client.sendall(data)
        return self._end(client, server)

    def _end(self, *ends: socket.socket) -> None:
        for one in ends:
            self._watches.pop(one, None)
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextmanager
def a_watch_relay(kubeconfig: Path) -> Iterator[WatchRelay]:
    made = WatchRelay(kubeconfig)
    try:
        yield made
    finally:
        made.close()
