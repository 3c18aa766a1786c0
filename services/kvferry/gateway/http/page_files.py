"""Serves the files of the dashboard and of the chat page: fixed sets, read once, with headers that forbid a page to
load anything else."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kvferry.gateway.observe import dashboard

FOLDER = Path(dashboard.__file__).with_name("page")
"""Files of the dashboard."""
CHAT_FOLDER = Path(__file__).with_name("chat_page")
"""Files of the chat page, which also has some of the dashboard's."""
_SHARED = ("base.css", "elements.js", "formats.js", "icon.svg")
_INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page."""

    body: bytes
    media_type: str
    etag: str
    """Entity tag with quotes: a hash of the body."""


@dataclass(frozen=True, slots=True)
class PageFiles:
    """All files of a page by name. A request is answered from this table and never opens a file."""

    files: Mapping[str, PageFile]

    @classmethod
    def dashboard(cls) -> "PageFiles":
        """Read the files of the dashboard.

        Raises:
            OSError: the folder or a file cannot be read.
            KeyError: a file has a suffix without media type.
        """
        return cls.load(FOLDER.iterdir())

    @classmethod
    def chat(cls) -> "PageFiles":
        """Read the files of the chat page; see `dashboard` for the errors."""
        return cls.load((*CHAT_FOLDER.iterdir(), *(FOLDER / name for name in _SHARED)))

    @classmethod
    def load(cls, paths: Iterable[Path]) -> "PageFiles":
        """Read files; see `dashboard` for the errors."""
        return cls({path.name: _read(path) for path in sorted(paths) if path.is_file()})

    async def index(self, request: Request) -> Response:
        """Answer `GET /`."""
        return _answer(request, self.files[_INDEX])

    async def file(self, request: Request) -> Response:
        """Answer `GET /page/{file}`.

        Raises:
            HTTPException: 404, the page has no such file.
        """
        found = self.files.get(request.path_params["file"])
        if found is None:
            raise HTTPException(404)
        return _answer(request, found)


def _read(path: Path) -> PageFile:
    body = path.read_bytes()
    return PageFile(body, _TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def _answer(request: Request, file: PageFile) -> Response:
    headers = {**_HEADERS, "etag": file.etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.etag in known or known == ["*"]:
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)
