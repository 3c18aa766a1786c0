"""The files of the dashboard and of the chat page over HTTP, and the lists that the dashboard reads."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from importlib.metadata import version

import httpx
import pytest
from harness.fakes.scripted_gateway import ScriptedGateway, scripted_gateway
from harness.waiting import eventually

from kvferry.core.ids import RequestId
from kvferry.gateway.decide.config import HttpConfig
from kvferry.gateway.http.page_files import CHAT_FOLDER, FOLDER, PageFiles

PAGES = {"dashboard": PageFiles.dashboard(), "chat": PageFiles.chat()}
TEXTS = {page: {name: file.body.decode() for name, file in files.files.items()} for page, files in PAGES.items()}
OUTSIDE = [
    "/page/",
    "/page/../quantiles.py",
    "/../pyproject.toml",
    "/page/%2e%2e%2fquantiles.py",
    "/page/..%2f..%2fgateway.py",
    "/page/....//quantiles.py",
    "/page//etc/passwd",
    "/page/app.js/",
    "/page/app.js%00.html",
    "/page/APP.js",
    "/page/" + "a" * 5000,
    "/index.html",
]
SINKS = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser|setHTML")
"""What makes a text into elements or code."""


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    async with scripted_gateway() as running:
        yield running


@pytest.fixture
async def client(gateway: ScriptedGateway) -> AsyncIterator[httpx.AsyncClient]:
    """Client of the port of the dashboard."""
    async with httpx.AsyncClient(base_url=gateway.admin_url, timeout=20) as opened:
        yield opened


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def port(gateway: ScriptedGateway, page: str) -> AsyncIterator[httpx.AsyncClient]:
    """Client of the port of the page."""
    async with httpx.AsyncClient(base_url=gateway.admin_url if page == "dashboard" else gateway.url) as opened:
        yield opened


async def test_the_page_and_its_files_are_served_under_a_strict_policy(port: httpx.AsyncClient, page: str) -> None:
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    for path in ("/", *(f"/page/{name}" for name in TEXTS[page])):
        answer = await port.get(path)
        assert answer.status_code == 200, path
        suffix = "html" if path == "/" else path.rpartition(".")[2]
        assert answer.headers["content-type"].partition(";")[0] == kinds[suffix]
        policy = answer.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'"} <= set(policy)
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


async def test_an_unchanged_file_is_not_sent_again(port: httpx.AsyncClient, page: str) -> None:
    first = await port.get("/page/app.js")
    tag = first.headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = await port.get("/page/app.js", headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert "content-security-policy" in again.headers
    changed = await port.get("/page/app.js", headers={"if-none-match": '"other"'})
    assert changed.content == first.content
    assert len({file.etag for file in PAGES[page].files.values()}) == len(TEXTS[page])


async def test_no_file_outside_of_the_page_is_served(gateway: ScriptedGateway, page: str) -> None:
    listening = gateway.gateway.listening
    for path in OUTSIDE:
        answer = await sent(listening.admin if page == "dashboard" else listening.http, path)
        assert int(answer.split(b" ", 2)[1]) in (404, 307), (path, answer[:200])  # 307: redirect without final slash
        assert len(answer) < 2000, path


async def sent(address: str, path: str) -> bytes:
    """Send a path unchanged, which client libraries would normalize, and return the whole answer."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    return answer


async def test_the_page_is_only_read(client: httpx.AsyncClient) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        for path in ("/", "/page/app.js", "/debug/overview", "/debug/requests"):
            assert (await client.request(method, path)).status_code == 404


async def test_the_chat_page_is_only_read_and_may_be_switched_off() -> None:
    for has_page, status in ((True, 405), (False, 404)):
        http = HttpConfig(address="127.0.0.1:0", has_page=has_page)
        async with scripted_gateway(http=http) as gateway, httpx.AsyncClient(base_url=gateway.url) as clients:
            for path in ("/", "/page/app.js"):
                assert (await clients.get(path)).status_code == (200 if has_page else 404)
                refused = await clients.post(path, json={})
                assert refused.status_code == status
                assert refused.json()["error"]["code"] == ("method_not_allowed" if has_page else "not_found")
            assert (await clients.get("/page/none.js")).json()["error"]["code"] == "not_found"


def test_the_page_loads_its_own_files_only_and_has_no_inline_code(page: str) -> None:
    index = TEXTS[page]["index.html"]
    for name, text in TEXTS[page].items():
        assert "://" not in text.replace("http://www.w3.org/2000/svg", ""), name
        assert not SINKS.search(text), name
        for module in re.findall(r'from "\./([a-z]+\.js)"', text):
            assert module in TEXTS[page]
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son[a-z]+=|\sstyle=", index)
    loaded = set(re.findall(r'(?:src|href)="page/([^"]+)"', index))
    assert len(loaded) == 4
    assert loaded <= TEXTS[page].keys()


def test_each_part_of_a_page_has_a_name() -> None:
    dashboard, chat = TEXTS["dashboard"]["index.html"], TEXTS["chat"]["index.html"]
    labels = re.findall(r'aria-labelledby="([^"]+)"', dashboard)
    assert len(labels) >= 8
    assert all(f'id="{label}"' in dashboard for label in labels)
    fields = re.findall(r'<(?:input|select|textarea) id="([^"]+)"([^>]*)', chat)
    assert len(fields) == 6
    assert [name for name, rest in fields if f'for="{name}"' not in chat and "aria-label=" not in rest] == []


def test_every_file_of_a_page_is_small() -> None:
    for folder in (FOLDER, CHAT_FOLDER):
        for path in folder.iterdir():
            assert path.read_text("utf-8").count("\n") <= 200, path.name


async def test_requests_are_listed_newest_first_up_to_the_limit(
    gateway: ScriptedGateway, client: httpx.AsyncClient
) -> None:
    body = {"model": "bytes", "prompt": "a secret prompt", "max_tokens": 3, "n": 2}
    ended = gateway.gateway.dispatcher.journal.find
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as clients:
        for number in range(3):
            answer = await clients.post("/v1/completions", json=body, headers={"x-request-id": f"listed-{number}"})
            assert answer.status_code == 200
            await eventually(lambda name=f"listed-{number}": len(ended("", RequestId(name)) or ()) == 2)
    listed = await client.get("/debug/requests", params={"limit": 2})
    assert [one["request_id"] for one in listed.json()["requests"]] == ["listed-2", "listed-1"]
    one = listed.json()["requests"][0]
    assert (one["outcome"], one["num_samples"], one["output_tokens"]) == ("done", 2, 6)
    assert "secret" not in (await client.get("/debug/requests")).text
    assert listed.headers["cache-control"] == "no-store"
    (sample, _) = (await client.get("/debug/requests/listed-2")).json()["tenants"][0]["samples"]
    assert sample["phases"][-1]["end"] == sample["timing"]["total_seconds"]


async def test_a_list_has_no_unknown_or_doubled_parameters(client: httpx.AsyncClient) -> None:
    for query in ("limit=1&limit=2", "limt=1"):
        refused = await client.get(f"/debug/requests?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, query.partition("=")[0])


async def test_a_limit_out_of_range_is_refused_by_name(client: httpx.AsyncClient) -> None:
    for limit in ("0", "201", "-1", "1e2", "", "x", "٣", "9" * 5000):
        refused = await client.get("/debug/requests", params={"limit": limit})
        assert refused.status_code == 400, limit
        assert refused.json()["error"]["param"] == "limit"
        assert "1 to 200" in refused.json()["error"]["message"]
        assert len(refused.content) < 1000


async def test_the_overview_has_series_and_totals(client: httpx.AsyncClient) -> None:
    overview = (await client.get("/debug/overview")).json()
    assert set(overview["totals"]["prompt_tokens_by_source"]) == {"computed", "cached", "peer", "tier"}
    assert {len(values) for values in overview["series"].values()} == {len(overview["series"]["seconds_ago"])}
    assert (overview["model"], overview["version"]) == ("bytes", version("kvferry"))
    assert overview["uptime_seconds"] > 0


async def test_a_request_is_listed_while_it_waits_and_while_it_runs_then_as_ended() -> None:
    body = {"model": "bytes", "prompt": "a secret prompt", "max_tokens": 3, "stream": True}
    async with scripted_gateway(prefill=0, decode=0, both=1, max_streams=1) as gateway, AsyncExitStack() as opened:
        client = await opened.enter_async_context(httpx.AsyncClient(base_url=gateway.url, timeout=20))
        admin = await opened.enter_async_context(httpx.AsyncClient(base_url=gateway.admin_url, timeout=20))

        async def states() -> dict[str, str]:
            listed = (await admin.get("/debug/requests")).json()
            return {one["request_id"]: one["state"] for one in listed["running"]}

        async def ask(name: str) -> None:
            answer = await client.post("/v1/completions", json=body, headers={"x-request-id": name})
            assert answer.status_code == 200, answer.text

        may_go = asyncio.Event()
        gateway.workers.all[0].step = may_go.wait
        first = asyncio.create_task(ask("first"))
        await eventually(lambda: gateway.gateway.dispatcher.open_streams == 1)
        second = asyncio.create_task(ask("second"))
        await eventually(lambda: len(gateway.gateway.gate.waiting) == 1)
        assert await states() == {"first": "prefill", "second": "queued"}
        third = asyncio.create_task(ask("third"))
        await eventually(lambda: len(gateway.gateway.gate.waiting) == 2)
        third.cancel()
        await eventually(lambda: len(gateway.gateway.gate.waiting) == 1)
        assert await states() == {"first": "prefill", "second": "queued"}
        answer = await admin.get("/debug/requests")
        assert "secret" not in answer.text
        assert answer.headers["cache-control"] == "no-store"
        assert answer.json()["num_further_running"] == 0
        may_go.set()
        await asyncio.gather(first, second)
        await eventually(lambda: gateway.gateway.dispatcher.open_streams == 0)
        assert await states() == {}
        ended = (await admin.get("/debug/requests")).json()["requests"]
        assert {one["request_id"] for one in ended} == {"first", "second"}
