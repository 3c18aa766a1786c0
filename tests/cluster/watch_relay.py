"""Stands between a client and the API server, in plain HTTP to the client, and can silence the watches of one kind."""

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit


class WatchRelay:
    """Passes bytes both ways; a connection that watches a stalled kind stays open and says nothing."""

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
        """Plural of the kind whose watches are silent."""
        self._threads[0].start()

    def write_kubeconfig(self, path: Path) -> Path:
        """Of those who are to come this way."""
        server = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        path.write_text(json.dumps({**self._config, "clusters": [{"name": "kvferry", "cluster": {"server": server}}]}))
        return path

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
                server = self._tls.wrap_socket(socket.create_connection(self._server), server_hostname=self._server[0])
                self._open += [client, server]
                watched = [""]
                for source, target, is_request in ((client, server, True), (server, client, False)):
                    thread = threading.Thread(target=self._pass_on, args=(source, target, is_request, watched))
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_request: bool, watched: list[str]) -> None:
        with suppress(OSError, ValueError):
            while data := source.recv(1 << 16):
                if is_request:
                    line = data.partition(b"\r\n")[0].decode(errors="replace")
                    watched[0] = line.partition("?")[0].rpartition("/")[2] if "watch=true" in line else ""
                elif watched[0] and watched[0] == self.stalled:
                    continue
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


@contextmanager
def a_watch_relay(kubeconfig: Path) -> Iterator[WatchRelay]:
    made = WatchRelay(kubeconfig)
    try:
        yield made
    finally:
        made.close()
