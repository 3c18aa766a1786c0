"""Requests that browsers make for pages of other origins, to every route of both HTTP ports."""

import re
from collections.abc import AsyncIterator, Mapping

import httpx
import pytest
from harness.fakes.scripted_gateway import ScriptedGateway, scripted_gateway
from starlette.routing import Route

from kvferry.core.errors import KvferryError
from kvferry.gateway.decide.config import HttpConfig
from kvferry.gateway.http.browsers import BrowserRules

FOREIGN: Mapping[str, Mapping[str, str]] = {
    "other origin": {"origin": "https://evil.example"},
    "other port": {"origin": "http://127.0.0.1:3"},
    "sandbox": {"origin": "null"},
    "other site": {"sec-fetch-site": "cross-site"},
    "same site": {"sec-fetch-site": "same-site"},
    "link": {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "origin": "https://evil.example"},
    "redirected": {"sec-fetch-site": "cross-site", "origin": "{own}"},
    "false statement": {"sec-fetch-site": "same-origin", "origin": "https://evil.example"},
    "rebound": {"host": "evil.example"},
    "rebound, same origin": {"host": "evil.example", "origin": "http://evil.example", "sec-fetch-site": "same-origin"},
}
CODES = {"cross_origin", "host_not_allowed"}
BODY = {"content-type": "application/json"}


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    async with scripted_gateway() as running:
        yield running


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=20) as opened:
        yield opened


def routes(gateway: ScriptedGateway) -> list[tuple[str, str]]:
    """Return method and URL of every route of both ports."""
    parts, found = gateway.gateway.parts, []
    for base, served in ((gateway.url, parts.client_api.routes()), (gateway.admin_url, parts.admin_api.routes())):
        for route in served:
            assert isinstance(route, Route), "a mounted application has routes of its own: add them here"
            path = re.sub(r"{[^}]*}", "one", route.path)
            found += [(method, base + path) for method in sorted(route.methods or ())]
    return found


@pytest.mark.parametrize("kind", FOREIGN)
async def test_no_route_of_either_port_answers_a_foreign_page(
    gateway: ScriptedGateway, client: httpx.AsyncClient, kind: str
) -> None:
    asked = routes(gateway)
    assert {method for method, _ in asked} >= {"GET", "POST", "DELETE"}
    assert len(asked) > 40
    for method, url in asked:
        own = url[: url.index("/", 8)]
        headers = {name: value.format(own=own) for name, value in FOREIGN[kind].items()}
        answer = await client.request(method, url, headers=headers)
        if kind == "link" and method in ("GET", "HEAD"):
            assert answer.status_code != 403, (method, url)
        elif method == "HEAD":
            assert answer.status_code == 403, (method, url)
        else:
            assert answer.status_code == 403, (method, url, answer.text)
            error = answer.json()["error"]
            assert url.endswith(("/v1/messages", "/count_tokens")) or error["code"] in CODES
    assert [worker.num_resets for worker in gateway.workers.all] == [0, 0]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
async def test_no_route_of_either_port_takes_a_body_that_is_not_declared_as_json(
    gateway: ScriptedGateway, client: httpx.AsyncClient, kind: str | None
) -> None:
    for method, url in routes(gateway):
        if method not in ("GET", "HEAD"):
            headers = {} if kind is None else {"content-type": kind}
            answer = await client.request(method, url, content=b"{}", headers=headers)
            if url.endswith("/v1/files"):  # a form: the rules of origins protect it
                continue
            assert answer.status_code == 415, (method, url, answer.text)
            assert "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "{own}"},
        {"origin": "{own}", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
        {"host": "localhost", "origin": "http://localhost"},
        {"host": "LocalHost.:8000"},
        {"host": "127.9.8.7:1"},
        {"host": "[::1]:1"},
        # A proxy ends TLS, and the browser states that the origin is its own.
        {"host": "localhost", "origin": "https://localhost", "sec-fetch-site": "same-origin"},
    ],
)
async def test_own_pages_and_programs_are_answered(
    gateway: ScriptedGateway, client: httpx.AsyncClient, headers: Mapping[str, str]
) -> None:
    for base, path in ((gateway.url, "/v1/completions"), (gateway.admin_url, "/unpin_prefix")):
        made = {name: value.format(own=base) for name, value in headers.items()}
        body = {"model": "bytes", "prompt": "hi", "max_tokens": 1} if "v1" in path else {"prompt": "hi"}
        answer = await client.post(base + path, json=body, headers=made)
        assert answer.status_code == 200, answer.text


async def test_a_change_without_a_body_needs_no_content_type() -> None:
    async with scripted_gateway() as gateway, httpx.AsyncClient() as client:
        for headers in ({}, {"content-type": "application/x-www-form-urlencoded", "content-length": "0"}):
            assert (await client.post(f"{gateway.admin_url}/reset_prefix_cache", headers=headers)).status_code == 200
        assert [worker.num_resets for worker in gateway.workers.all] == [2, 2]


async def test_the_origins_of_the_client_api_are_foreign_to_the_admin_port(client: httpx.AsyncClient) -> None:
    http = HttpConfig(address="127.0.0.1:0", cors_origins=("*",), allowed_hosts=("llm.example",))
    async with scripted_gateway(http=http) as gateway:
        for headers in ({"origin": "https://a.example", "sec-fetch-site": "cross-site"}, {"host": "llm.example:80"}):
            assert (await client.get(f"{gateway.url}/v1/models", headers=headers)).status_code == 200
            expected = 403 if "origin" in headers else 200
            assert (await client.get(f"{gateway.admin_url}/fleet", headers=headers)).status_code == expected


@pytest.mark.parametrize(
    ("address", "hosts", "host", "is_accepted"),
    [
        ("127.0.0.1:1", (), "127.0.0.1.evil.example", False),
        ("127.0.0.1:1", (), "localhost.evil.example", False),
        ("127.0.0.1:1", (), "localhost@evil.example", False),
        ("127.0.0.1:1", (), "10.0.0.7", False),
        ("127.0.0.1:1", (), "", False),
        ("127.0.0.1:1", ("10.0.0.7",), "10.0.0.7:80", True),
        ("127.0.0.1:1", ("fd00::7",), "[fd00::7]:80", True),
        ("[::1]:1", (), "evil.example", False),
        ("localhost:1", (), "evil.example", False),
        ("0.0.0.0:1", (), "any.example", True),
        ("10.0.0.7:1", (), "any.example", True),
        ("0.0.0.0:1", ("llm.example",), "any.example", False),
        ("0.0.0.0:1", ("llm.example",), "LLM.example:8000", True),
        # Probes and the operator use the addresses of pods and Services.
        ("0.0.0.0:1", ("llm.example",), "10.1.2.3:8000", True),
    ],
)
def test_the_hosts_of_a_listener(address: str, hosts: tuple[str, ...], host: str, is_accepted: bool) -> None:
    scope = {"type": "http", "method": "GET", "scheme": "http", "headers": [(b"host", host.encode())]}
    rules = BrowserRules.of(address, hosts)
    if is_accepted:
        rules.check(scope)
    else:
        with pytest.raises(KvferryError, match="--allowed-hosts") as refused:
            rules.check(scope)
        assert (refused.value.http_status, refused.value.reason) == (403, "HOST_NOT_ALLOWED")


@pytest.mark.parametrize(
    ("scheme", "host", "origin", "is_own"),
    [
        ("http", "a.example", "http://a.example:80", True),
        ("http", "a.example:80", "http://a.example", True),
        ("https", "a.example", "https://a.example:443", True),
        ("http", "a.example", "http://a.example:8080", False),
        ("http", "a.example", "https://a.example", False),
        ("http", "a.example", "http://b.a.example", False),
        ("http", "a.example", "http://a.example:99999", False),
        ("http", "a.example", "http://[a.example", False),
        ("http", "", "http://", False),
        ("http", "a.example", "file://", False),
    ],
)
def test_an_origin_is_scheme_host_and_port(scheme: str, host: str, origin: str, is_own: bool) -> None:
    headers = [(b"host", host.encode()), (b"origin", origin.encode())]
    scope = {"type": "http", "method": "POST", "scheme": scheme, "headers": headers}
    rules = BrowserRules.of("0.0.0.0:1", ())
    if is_own:
        rules.check(scope)
    else:
        with pytest.raises(KvferryError, match="--cors-origins"):
            rules.check(scope)
