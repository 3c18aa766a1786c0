"""A stand-in for the Hugging Face Hub on loopback, with the protocol that huggingface_hub speaks: information about a
repository, files by revision, and large files behind signed redirects to another server."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

SIGNATURE = "X-Signature=not-for-logs"
"""Query of the addresses of large files."""
_PIECE_BYTES = 64 << 10


def commit_of(name: str) -> str:
    """Return a commit for a name."""
    return hashlib.sha1(name.encode()).hexdigest()


@dataclass
class HubRepo:
    """A repository: its files, and how it departs from the ordinary."""

    files: dict[str, bytes]
    """Files of the default branch."""
    revisions: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files of other branches and tags."""
    gated: bool = False
    """Whether its files need `token`; its information does not."""
    private: bool = False
    """Whether all of it needs `token`."""
    token: str = ""
    is_withheld: bool = False
    """Whether its files are refused as those of a repository that does not exist, although it is listed."""
    large: tuple[str, ...] = (".safetensors", ".gguf")
    """Endings of files in large-file storage."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes that are claimed for files, by path."""
    digests: dict[str, object] = field(default_factory=dict)
    """Digests that are claimed for files, by path."""
    listed: tuple[str, ...] = ()
    """Further paths in the list of files."""

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return commit and files of a branch, a tag or a commit."""
        for name, files in {"main": self.files, **self.revisions}.items():
            content = b"".join(path.encode() + hashlib.sha1(data).digest() for path, data in sorted(files.items()))
            commit = commit_of(f"{name} {content!r}")
            if revision in {name, commit}:
                return commit, files
        return None


@dataclass(frozen=True)
class HubRequest:
    """A request that the stand-in has received."""

    method: str
    path: str
    range: str
    authorization: str


class StandInHub:
    """The repositories, faults and requests of a stand-in."""

    def __init__(self) -> None:
        self.repos: dict[str, HubRepo] = {}
        self.requests: list[HubRequest] = []
        self.url = ""
        self.store_url = ""
        self.cuts: dict[str, list[int]] = {}
        """After how many bytes the connection is cut, for each of the next answers with a file, by its end of path."""
        self.instead: dict[str, bytes] = {}
        """Content that is sent instead of a file's, by the end of its path."""
        self.status = 0
        """Status of every answer; 0 for none."""

    def environment(self) -> dict[str, str]:
        """Return the variables with which huggingface_hub uses the stand-in, without a token."""
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": ""}

    def fetched(self) -> list[str]:
        """Return the names of the files that were sent, in order."""
        return [one.path.rpartition("/")[2] for one in self.requests if one.method == "GET" and "/api/" not in one.path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: StandInHub
    is_store = False

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        authorization = self.headers.get("Authorization", "")
        self.hub.requests.append(HubRequest(self.command, path, self.headers.get("Range", ""), authorization))
        if self.hub.status:
            self._send(self.hub.status, b"{}")
        elif self.is_store:
            self._stored(path, url.query)
        elif path == "/api/models":
            self._search(parse_qs(url.query))
        elif path.startswith("/api/models/"):
            self._information(path.removeprefix("/api/models/"))
        else:
            self._file(path.removeprefix("/"))

    def _search(self, query: Mapping[str, list[str]]) -> None:
        text, author = (query.get(key, [""])[0].lower() for key in ("search", "author"))
        found = [
            {"id": name}
            for name, repo in self.hub.repos.items()
            if not repo.private and text in name.lower() and (not author or name.lower().startswith(f"{author}/"))
        ]
        self._send(200, json.dumps(found[: int(query.get("limit", ["1000"])[0])]).encode())

    def _allowed(self, name: str, *, file: bool) -> HubRepo | None:
        """Return a repository; send the error and return `None` if it does not exist for the caller."""
        repo = self.hub.repos.get(name)
        has_token = repo is not None and self.headers.get("Authorization") == f"Bearer {repo.token}"
        if repo is None or (repo.private and not has_token) or (file and repo.is_withheld):
            # The hub does not tell strangers whether a repository exists.
            self._send(401, b'{"error":"Invalid username or password."}', {"X-Error-Code": "RepoNotFound"})
            return None
        if file and repo.gated and not has_token:
            self._send(403, b'{"error":"Access is restricted."}', {"X-Error-Code": "GatedRepo"})
            return None
        return repo

    def _information(self, rest: str) -> None:
        name, _, revision = rest.partition("/revision/")
        repo = self._allowed(name, file=False)
        if repo is None:
            return
        found = repo.at(revision or "main")
        if found is None:
            self._send(404, b'{"error":"Invalid rev id"}', {"X-Error-Code": "RevisionNotFound"})
            return
        commit, files = found
        siblings: list[dict[str, object]] = []
        for path, data in files.items():
            size = repo.sizes.get(path, len(data))
            one: dict[str, object] = {
                "rfilename": path,
                "size": size,
                "blobId": repo.digests.get(path, _git_sha1(data)),
            }
            if path.endswith(repo.large):
                pointer = (
                    f"version https://git-lfs.github.com/spec/v1\noid sha256:{_sha256(data)}\nsize {size}\n".encode()
                )
                large = {"size": size, "sha256": repo.digests.get(path, _sha256(data)), "pointerSize": len(pointer)}
                one |= {"blobId": _git_sha1(pointer), "lfs": large}
            siblings.append(one)
        siblings += [{"rfilename": path, "size": 1, "blobId": _git_sha1(b"x")} for path in repo.listed]
        body = {"id": name, "sha": commit, "private": repo.private, "siblings": siblings}
        self._send(200, json.dumps(body).encode())

    def _file(self, rest: str) -> None:
        org, name, _, revision, path = rest.split("/", 4)
        repo = self._allowed(f"{org}/{name}", file=True)
        if repo is None:
            return
        found = repo.at(revision)
        if found is None:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        commit, files = found
        if path not in files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        data = files[path]
        if path.endswith(repo.large):
            size = repo.sizes.get(path, len(data))
            linked = {"X-Linked-Etag": f'"{_sha256(data)}"', "X-Linked-Size": str(size), "X-Repo-Commit": commit}
            place = f"{self.hub.store_url}/{_sha256(data)}/{path}?{SIGNATURE}"
            self._send(302, b"", {**linked, "Location": place})
            return
        self._content(path, data, {"ETag": f'"{_git_sha1(data)}"', "X-Repo-Commit": commit})

    def _stored(self, path: str, query: str) -> None:
        _, digest, name = path.split("/", 2)
        for repo in self.hub.repos.values():
            for files in (repo.files, *repo.revisions.values()):
                if name in files and _sha256(files[name]) == digest and query == SIGNATURE:
                    self._content(name, files[name], {"ETag": '"of-the-store"'})
                    return
        self._send(403, b"")

    def _content(self, path: str, data: bytes, headers: Mapping[str, str]) -> None:
        data = next((content for end, content in self.hub.instead.items() if path.endswith(end)), data)
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        more = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        self._send(206 if start else 200, data[start:], {**headers, **more, "Accept-Ranges": "bytes"}, path)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None, path: str = "") -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        cuts = next((cuts for end, cuts in self.hub.cuts.items() if path and path.endswith(end) and cuts), None)
        if cuts is not None:
            self.wfile.write(body[: cuts.pop(0)])
            self.close_connection = True
            return
        for place in range(0, len(body), _PIECE_BYTES):
            self.wfile.write(body[place : place + _PIECE_BYTES])


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """A client that ends a transfer is no error of the server."""


@contextmanager
def stand_in_hub() -> Iterator[StandInHub]:
    """Yield a running stand-in, without repositories."""
    hub = StandInHub()
    servers = [
        _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub, "is_store": is_store}))
        for is_store in (False, True)
    ]
    hub.url, hub.store_url = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()
