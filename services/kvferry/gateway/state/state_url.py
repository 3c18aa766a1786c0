"""URL of the Redis server that the gateways of a pool share, and its options."""

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from kvferry.core.errors import UsageError
from kvferry.core.process.config import read_secret_file

_DEFAULT_PORT = 6379
_SCHEMES = ("redis", "rediss", "redis+unix")
_OPTIONS = ("password_file", "cacert")


@dataclass(frozen=True, slots=True)
class StateServer:
    """A Redis server."""

    text: str
    """The URL without user, password and options, for messages."""
    host: str = ""
    port: int = _DEFAULT_PORT
    socket: str = ""
    """Path of a Unix socket; empty for TCP."""
    is_tls: bool = False
    cacert: str = ""
    """PEM file with the CA of the server's certificate; empty for those of the system."""
    db: int = 0
    username: str = ""
    password: str = field(default="", repr=False)


def parse_state_url(url: str) -> StateServer:
    """Parse `redis://HOST:PORT/DB`, `rediss://...` or `redis+unix:///PATH`, with the options `password_file=` and
    `cacert=`.

    Raises:
        UsageError: the URL has none of these forms, an option is unknown, or the password cannot be read.
    """

    def refuse(what: str) -> UsageError:
        return UsageError(f"state {text}: {what}", field="state")

    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise UsageError("the URL of --state is malformed; use redis://HOST:6379/0", field="state") from None
    host = parts.hostname or ""
    is_unix = parts.scheme == "redis+unix"
    shown_host = f"[{host}]" if ":" in host else host
    text = f"{parts.scheme}://{shown_host}{'' if port is None else f':{port}'}{parts.path}"
    if parts.scheme not in _SCHEMES:
        raise refuse(f"not a Redis server; use one of the schemes {', '.join(_SCHEMES)}")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in options:
        if name not in _OPTIONS:
            raise refuse(f"unknown option {name!r}; use one of {', '.join(_OPTIONS)}")
    path = "" if is_unix else parts.path.strip("/")
    if path and not path.isdecimal():
        raise refuse(f"the path must be the database number, not {path!r}")
    if is_unix and not parts.path.strip("/"):
        raise refuse("the socket is missing; use redis+unix:///run/redis.sock")
    if not is_unix and not host:
        raise refuse("the host is missing; use redis://HOST:6379/0")
    if "cacert" in options and parts.scheme != "rediss":
        raise refuse("cacert= needs rediss://")
    password = unquote(parts.password or "")
    if "password_file" in options:
        if password:
            raise refuse("both a password and password_file= are set; keep the file")
        password = read_secret_file(Path(options["password_file"]), "state").decode("utf-8", "strict")
    if parts.username and not password:
        raise refuse("a user is set without a password; add the password, or password_file=")
    return StateServer(
        text=text,
        host=host,
        port=port or _DEFAULT_PORT,
        socket=unquote(parts.path) if is_unix else "",
        is_tls=parts.scheme == "rediss",
        cacert=options.get("cacert", ""),
        db=int(path or 0),
        username=unquote(parts.username or ""),
        password=password,
    )
