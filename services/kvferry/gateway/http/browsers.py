"""Refuses requests that web pages of other origins make by a user's browser, before any handler runs.

A page may send requests to every address that the browser reaches, also to this machine, without being able to read the
answers. Programs other than browsers send neither `Origin` nor `Sec-Fetch-Site`, and are not affected.

| rule | refuses |
| --- | --- |
| `Origin` is the server's own, or allowed by --cors-origins | requests of other pages |
| `Sec-Fetch-Site` is `same-origin` or `none`, unless the origin is allowed | the same, if the browser omits `Origin` |
| a body is declared as JSON | forms, and scripts that avoid a preflight request |
| `Host` is a loopback name or in --allowed-hosts | pages whose name resolves to this machine (DNS rebinding) |

Links to a GET route work from everywhere, since GET changes nothing.
"""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvferry.core.errors import Forbidden, KvferryError, shortened
from kvferry.gateway.http.body_route import check_media_type
from kvferry.rpc.access.hosts import ip_of

SAFE_METHODS = frozenset({"GET", "HEAD"})
"""Methods that change nothing."""
FORM_PATHS = frozenset({"/v1/files"})
"""Paths whose bodies are forms, which pages may send across sites: only the rules of origins and hosts hold there."""
_ANY = "*"
_OWN_SITES = frozenset({"same-origin", "none"})
"""Values of `Sec-Fetch-Site` of requests that no foreign page made; `none` is a request of the user."""
_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:@/\s]+)(?::[0-9]*)?")
_log = logging.getLogger(__name__)


class CrossOrigin(Forbidden):
    """A web page of an origin that is not allowed made the request."""

    reason = "CROSS_ORIGIN"


class HostNotAllowed(Forbidden):
    """The request's `Host` is not a name of this server."""

    reason = "HOST_NOT_ALLOWED"


def is_loopback(host: str) -> bool:
    """Return whether a host, a name or an IP address with or without brackets, is loopback by its notation."""
    address = ip_of(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def is_loopback_address(address: str) -> bool:
    """Return whether a listener at `host:port` is reached from this machine only."""
    return is_loopback(address.rpartition(":")[0])


@dataclass(frozen=True, slots=True)
class BrowserRules:
    """The origins and hosts of the requests that one listener accepts."""

    is_local: bool
    """Whether the listener is bound to loopback, so that other hosts than loopback's must be listed."""
    hosts: frozenset[str] = frozenset()
    """Further hosts, names or IP addresses in lower case, without port."""
    origins: tuple[str, ...] = ()
    """Foreign origins that are allowed; `*` for all."""

    @classmethod
    def of(cls, address: str, hosts: Sequence[str], origins: tuple[str, ...] = ()) -> "BrowserRules":
        """Return the rules of a listener.

        Args:
            address: `host:port` of the listener.
            hosts: further accepted hosts, without port.
            origins: foreign origins that are allowed; `*` for all.
        """
        return cls(is_loopback_address(address), frozenset(host.strip("[]").lower() for host in hosts), origins)

    def check(self, scope: Scope) -> None:
        """Check the headers of a request.

        Args:
            scope: ASGI scope of the request.

        Raises:
            HostNotAllowed: the host is not accepted.
            CrossOrigin: a page of another origin made the request.
            UnsupportedMedia: the request has a body that is not declared as JSON.
        """
        headers = Headers(scope=scope)
        for host in headers.getlist("host"):
            if not self._is_host(host):
                raise HostNotAllowed(
                    f"the host {shortened(host)!r} is not a name of this server; use a loopback address, or add the "
                    "host with --allowed-hosts"
                )
        self._check_origin(scope, headers)
        is_form = scope.get("path") in FORM_PATHS
        if scope["method"] not in SAFE_METHODS and _has_body(headers) and not is_form:
            check_media_type(Request(scope))

    def _is_host(self, given: str) -> bool:
        if not (self.is_local or self.hosts):
            return True
        found = _HOST.fullmatch(given)
        if found is None:
            return False
        host = found[1].strip("[]").removesuffix(".").lower()
        # A name may be bound to another address at any time, an address may not.
        return host in self.hosts or is_loopback(host) or (not self.is_local and ip_of(host) is not None)

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        given, site = headers.getlist("origin"), headers.get("sec-fetch-site", "none")
        if _ANY in self.origins or (given and all(origin in self.origins for origin in given)):
            return
        if site in _OWN_SITES and all(_is_own(origin, scope, headers) for origin in given):
            return
        if scope["method"] in SAFE_METHODS and headers.get("sec-fetch-mode") == "navigate":
            return
        page = f"of {shortened(given[0])!r}" if given else "of another origin"
        raise CrossOrigin(
            f"a web page {page} may not make this request; call the server from its own origin or by a program, or "
            "allow the origin with --cors-origins, which is for the client API only"
        )


class BrowserGuard:
    """ASGI wrapper that answers the requests that its rules refuse."""

    def __init__(self, inner: ASGIApp, rules: BrowserRules, answer: Callable[[Scope, KvferryError], Response]) -> None:
        """
        Args:
            inner: the application that answers the other requests.
            rules: the rules.
            answer: returns the response to a request that failed.
        """
        self._inner = inner
        self._rules = rules
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._rules.check(scope)
            except KvferryError as refused:
                _log.info("%r: %s: %s", shortened(scope["path"]), refused.reason, refused.message)
                await self._answer(scope, refused)(scope, receive, send)
                return
        await self._inner(scope, receive, send)


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip("0") != ""


def _is_own(origin: str, scope: Scope, headers: Headers) -> bool:
    """Return whether `origin` is that of the request's URL. A proxy that ends TLS hides the scheme from this server;
    the browser's statement that the origin is the same then stands for it, which no script can forge."""
    page = _parts(origin)
    if page is None or page.scheme not in _PORTS:
        return False
    is_stated = headers.get("sec-fetch-site") == "same-origin"
    scheme = page.scheme if is_stated else scope["scheme"]
    own = _parts(f"{scheme}://{headers.get('host', '')}")
    return own is not None and bool(own.hostname) and _key(page) == _key(own)


def _key(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, _PORTS.get(parts.scheme) if parts.port is None else parts.port


def _parts(url: str) -> SplitResult | None:
    """Return the parts of an origin; `None` if it is not valid."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    return parts
