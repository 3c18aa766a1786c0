"""The address of a gateway, from a URL as people write it."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from kvferry.core.errors import UsageError, shortened

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """Where requests are sent."""

    is_tls: bool
    host: str
    port: int
    prefix: str
    """Path before the API's `/v1`, without a slash at its end; usually empty."""

    @classmethod
    def parse(cls, text: str) -> "ServerUrl":
        """Parse a base URL; `/v1` at its end is ignored, and without a scheme it is HTTP.

        Raises:
            UsageError: it is not a URL of an HTTP server.
        """
        given = text.strip()
        try:
            parts = urlsplit(given if "://" in given else f"http://{given}")
            host, port = parts.hostname or "", parts.port
        except ValueError:
            parts, host, port = urlsplit(""), "", None
        is_plain = host.isascii() and host.isprintable() and " " not in host
        if parts.scheme not in _PORTS or not host or not is_plain or parts.query or parts.fragment:
            raise UsageError(
                f"the URL {shortened(repr(text))} cannot be used; use one such as http://127.0.0.1:8000", field="url"
            )
        if parts.username is not None:
            raise UsageError(
                "the URL has a user or a password; use --api-key-file or KVFERRY_API_KEY instead", field="url"
            )
        prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        if not (prefix.isascii() and prefix.isprintable()) or " " in prefix:
            raise UsageError(f"the path of the URL {shortened(repr(text))} must be ASCII without spaces", field="url")
        return cls(parts.scheme == "https", host, _PORTS[parts.scheme] if port is None else port, prefix)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.prefix}"
