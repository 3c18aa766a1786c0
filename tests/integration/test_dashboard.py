"""The dashboard of a real stack, and of a gateway with scripted workers, in a real browser."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.fakes.scripted_gateway import scripted_gateway
from harness.servers.chromium import BINARY, Chromium, chromium
from harness.servers.processes import running

SECONDS = 120.0
ADDRESSES = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-level", "error")
ENGINE = ("--model", "tiny", "--dtype", "float32", "--kv-memory", "16MiB", "--load-policy", "always")
SEQUENCES = ("--max-num-seqs", "2")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not BINARY.exists(), reason=f"needs {BINARY}: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    file = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    hashing = [sys.executable, "-m", "kvferry.cli.main", "key", "hash"]
    done = subprocess.run(
        hashing, input="key-of-the-tenant-alice\n", capture_output=True, text=True, check=True, timeout=SECONDS
    )
    file.write_text(f'[tenants.alice]\nkeys = ["{done.stdout.strip()}"]\n')
    with running("up", *ENGINE, *SEQUENCES, "--tenants", str(file), "--json", *ADDRESSES) as process:
        yield {**process.wait_for("ready"), "pid": process.process.pid}


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with chromium() as running_browser:
        yield running_browser


def ask(stack: dict[str, Any], request_id: str, tokens: int = 24) -> None:
    headers = {"authorization": "Bearer key-of-the-tenant-alice", "x-request-id": request_id}
    body = {"model": "tiny", "prompt": "Some words. " * 30, "max_tokens": tokens, "ignore_eos": True}
    answer = httpx.post(f"http://{stack['http']}/v1/completions", json=body, headers=headers, timeout=SECONDS)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_shows_the_stack(stack, browser: Chromium, tmp_path: Path, width: int, is_dark: bool) -> None:
    name = f"req-{width}-{is_dark}"
    for number in range(3):
        ask(stack, f"{name}-{number}", 40)
    browser.errors.clear()
    browser.look(width, 900, is_dark=is_dark)
    browser.open(f"http://{stack['admin']}/")
    browser.wait_for(f"document.querySelector('#requests')?.innerText.includes('{name}-2')")
    browser.wait_for("document.querySelector('#status').innerText.startsWith('Last updated')")
    text = browser.wait_for("document.querySelector('#workers').innerText.includes('exact') && document.body.innerText")
    for expected in ("accept requests", "ready", "alice", "Computed", "p95", "up ", "workers on cpu", "per second"):
        assert expected in text, expected
    assert version("kvferry") in text
    assert browser.evaluate("document.title") == "kvferry: tiny"
    assert broken_words(browser) == []
    browser.wait_for("document.querySelector('#first-token .line.main, #first-token .dot.main') !== null")
    # With the keyboard alone: the link of a request keeps the focus across updates and opens the request.
    browser.evaluate(f"[...document.querySelectorAll('#requests a')].find(a => a.innerText === '{name}-1').focus()")
    updated = browser.evaluate("document.querySelector('#status').innerText")
    browser.wait_for(f"document.querySelector('#status').innerText !== {updated!r}")
    assert browser.evaluate("document.activeElement.innerText") == f"{name}-1"
    browser.press("Enter", 13)
    phases = browser.wait_for("document.querySelector('#request .waterfall')?.getAttribute('aria-label')")
    assert "Prefill" in phases
    assert "Decode" in phases
    assert "candidate" in browser.evaluate("document.querySelector('#request').innerText")
    browser.wait_for("Math.abs(document.querySelector('#request-title').getBoundingClientRect().top) < innerHeight")
    browser.evaluate("document.querySelector('#request a').click()")
    browser.wait_for("document.querySelector('.waterfall') === null")
    browser.wait_for("document.querySelector('#requests-title').getBoundingClientRect().top < innerHeight")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width, "no element is wider than the screen"
    assert contrast(browser, "body") >= 7
    assert contrast(browser, "#workers .state") >= 4.5
    shot = Path(os.environ.get("SHOTS", tmp_path)) / f"{width}-{'dark' if is_dark else 'light'}.png"
    browser.screenshot(shot)
    assert shot.stat().st_size > 10_000
    for other in (320, 760, 761, 1040, 1041, 1220, 1221):  # around the widths at which the layout changes
        browser.look(other, 900, is_dark=is_dark)
        browser.wait_for(f"document.documentElement.scrollWidth <= {other}")
    assert browser.errors == []


def opened(browser: Chromium, url: str) -> None:
    """Load a page again, after the page of an earlier test was left."""
    browser.look(1280, 900, is_dark=False)
    browser.open("about:blank")
    browser.wait_for("location.href === 'about:blank'")
    browser.errors.clear()  # of the page before, whose gateway may have ended
    browser.open(url)
    browser.wait_for("document.querySelector('#status')?.innerText.startsWith('Last updated')")


def broken_words(browser: Chromium) -> list[str]:
    """Return the cells that are one short word on more than one line."""
    script = """[...document.querySelectorAll('td')].filter((cell) => {
      const text = cell.lastChild?.nodeType === 3 ? cell.lastChild : null;
      if (!text || text.length > 20 || text.data.includes(' ')) return false;
      const range = document.createRange();
      range.selectNodeContents(text);
      return range.getClientRects().length > 1;
    }).map((cell) => cell.innerText)"""
    return list(browser.evaluate(script))


async def test_a_running_request_is_shown_and_then_has_ended(browser: Chromium, tmp_path: Path) -> None:
    may_go, is_begun, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

    messages = itertools.count()

    async def step() -> None:
        if next(messages) == 2:  # the worker has sent two messages of its stream
            is_begun.set()
            await may_go.wait()

    def work() -> None:
        opened(browser, f"{gateway.admin_url}/")
        shown, ended = (f"document.querySelector('#{part}').innerText" for part in ("running", "requests"))
        row = browser.wait_for(f"{shown}.includes('a-running-one') && {shown}.includes('decode') && {shown}")
        for expected in ("(default)", "decode", "p0 → d0", " s"):
            assert expected in row, expected
        assert "secret" not in row
        assert "a-running-one" not in browser.evaluate(ended)
        assert "1 request" in browser.evaluate("document.querySelector('#stats').innerText")
        browser.screenshot(Path(os.environ.get("SHOTS", tmp_path)) / "running.png")
        loop.call_soon_threadsafe(may_go.set)
        browser.wait_for(f"{ended}.includes('a-running-one') && !{shown}.includes('a-running-one')")
        assert browser.errors == []

    async with scripted_gateway() as gateway, httpx.AsyncClient(timeout=SECONDS) as client, asyncio.timeout(SECONDS):
        gateway.workers.all[1].step = step
        body = {"model": "bytes", "prompt": "a secret prompt", "max_tokens": 8}
        headers = {"x-request-id": "a-running-one"}
        asked = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json=body, headers=headers))
        await is_begun.wait()
        await asyncio.to_thread(work)
        assert (await asked).status_code == 200


def test_a_chart_tells_the_value_at_a_point(stack, browser: Chromium) -> None:
    ask(stack, "for-a-value")
    opened(browser, f"http://{stack['admin']}/")
    said = "document.querySelector('#first-token')?.getAttribute('aria-valuetext')"
    browser.wait_for(f"{said}?.startsWith('now: p50 ')")
    browser.evaluate("document.querySelector('#first-token').focus()")
    for _ in range(3):
        browser.press("ArrowLeft", 37)
    assert " s ago: p50 " in browser.wait_for(f"{said}.includes('ago') && {said}")
    assert browser.evaluate("document.querySelector('#first-token .cursor') !== null")
    browser.press("Escape", 27)
    browser.wait_for(f"{said}.startsWith('now: ')")
    place = "document.querySelector('#rate')"
    browser.evaluate(f"{place}.scrollIntoView({{block: 'center'}})")
    box = f"{place}.getBoundingClientRect()"
    x, y = browser.evaluate(f"[{box}.right - 10, {box}.top + 60]")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    browser.wait_for(f"{place}.querySelector('.cursor') !== null && {place}.innerText.includes('ago')")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    browser.wait_for(f"{place}.querySelector('.cursor') === null")
    assert browser.errors == []


def contrast(browser: Chromium, selector: str) -> float:
    """Return the contrast between the text of an element and the panel's background, as WCAG 2 defines it."""
    text = browser.evaluate(f"getComputedStyle(document.querySelector({selector!r})).color")
    back = browser.evaluate("getComputedStyle(document.querySelector('.panel')).backgroundColor")
    light, dark = sorted((_luminance(text), _luminance(back)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    shares = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_a_queue_is_shown_by_priority_and_tenant(stack, browser: Chromium, tmp_path: Path) -> None:
    opened(browser, f"http://{stack['admin']}/")
    text = "document.querySelector('#queues').innerText"
    with ThreadPoolExecutor(60) as threads:
        pending = [threads.submit(ask, stack, f"queued-{number}", 600) for number in range(60)]
        browser.wait_for(f"['By priority', 'alice', 'sequences 2 of 2'].every((part) => {text}.includes(part))")
        shot = Path(os.environ.get("SHOTS", tmp_path)) / "queue.png"
        browser.screenshot(shot)
        for one in pending:
            one.result(SECONDS)
    browser.wait_for("document.querySelector('#queues').innerText.includes('0 queued')")


def test_markup_in_a_tenants_name_or_an_error_stays_text(stack, browser: Chromium) -> None:
    browser.open(f"http://{stack['admin']}/")
    markup = "<img src=x onerror=document.title=1>"
    script = f"""import('/page/workers.js').then(({{workers}}) => {{
      const load = {{running: 0, waiting: 0, loading: 0, blocks_total: 0, blocks_free: 0}};
      const worker = {{worker_id: {markup!r}, role: {markup!r}, takes_work: false, why_not: {markup!r},
        load, in_flight: 0, cache_map: {{state: 'blind', why: {markup!r}, blocks: 0}}}};
      const place = document.createElement('div');
      const source = {{state: 'stale', detail: {markup!r}}};
      place.append(...workers({{source, waking: {{detail: ''}}, workers: [worker]}}));
      return [place.querySelectorAll('img').length, place.textContent.split('<img').length - 1];
    }})"""
    browser.wait_for("document.readyState === 'complete'")
    assert browser.evaluate(script) == [0, 5]


def test_markup_in_a_running_request_stays_text(stack, browser: Chromium) -> None:
    opened(browser, f"http://{stack['admin']}/")
    markup = "<img src=x onerror=document.title=1>"
    script = f"""import('/page/running.js').then(({{running}}) => {{
      const one = {{request_id: {markup!r}, tenant: {markup!r}, sample_index: 1, state: {markup!r}, age_seconds: 75,
        prompt_tokens: 1, output_tokens: 2, beam_width: 0, prefill_worker: {markup!r}, decode_worker: {markup!r}}};
      const place = document.createElement('div');
      place.append(...running([one], 7));
      return [place.querySelectorAll('img').length, place.textContent.split('<img').length - 1, place.textContent];
    }})"""
    made, shown, text = browser.evaluate(script)
    assert (made, shown) == (0, 4), "a worker that computes and generates is named once"
    for expected in ("sample 1", "1 min 15 s", "and 7 newer"):
        assert expected in text, expected


def test_what_is_not_known_is_a_dash_and_what_is_few_is_not_zero(stack, browser: Chromium) -> None:
    opened(browser, f"http://{stack['admin']}/")
    script = """import('/page/stats.js').then(({stats}) => {
      const names = ['requests', 'errors', 'failed_streams', 'output_tokens'];
      const series = (values) => Object.fromEntries(names.map((name, n) => [`${name}_per_second`, values[n]]));
      const numbers = (values, fleet) => {
        const made = stats({window_seconds: 30, series: series(values)}, fleet);
        return [...made.querySelectorAll('b')].map((one) => one.textContent);
      };
      const flow = {dispatched: 1, queued: 1200, sequences: {in_use: 1, bound: null}};
      return [numbers([[], [], [], []], {held: 0}), numbers([[0.033], [0.5], [0], [1234.5]], {held: 0, flow})];
    })"""
    unknown, few = browser.evaluate(script)
    assert unknown == ["–"] * 5
    assert few == ["0.03", "0.5", "1,235", "1", "1,200"]


FORM = "application/x-www-form-urlencoded"


class _Elsewhere(BaseHTTPRequestHandler):
    """An empty page of another origin."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def elsewhere() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Elsewhere)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_page_of_another_origin_changes_nothing(stack, browser: Chromium, elsewhere: str, host: str) -> None:
    """A page of another port, which is of the same site, and one of another site."""
    pin = {"prompt": "Some words. " * 30, "ttl_seconds": 600, "tenant": "alice"}
    made = httpx.post(f"http://{stack['admin']}/pin_prefix", json=pin, timeout=SECONDS)
    assert made.status_code == 200, made.text
    pinned = _pins(stack)
    assert pinned
    before = _requests(stack)
    browser.open(f"http://{elsewhere.replace('127.0.0.1', host)}/")
    browser.wait_for(f"location.port === '{elsewhere.partition(':')[2]}' && document.readyState === 'complete'")
    script = """(async () => {
      const bodies = [undefined, '{"lora_name": "a", "lora_path": "a"}', PIN];
      for (const url of URLS) for (const body of bodies) for (const type of ['text/plain', 'FORM'])
        await fetch(url, {method: 'POST', mode: 'no-cors', headers: {'content-type': type}, body});
      for (const url of URLS) {
        const json = {method: 'POST', headers: {'content-type': 'application/json'}, body: '{}'};
        if (await fetch(url, json).then(() => true, () => false)) return url;
      }
      return 'done';
    })()"""
    admin = ("reset_prefix_cache", "pin_prefix", "unpin_prefix", "v1/load_lora_adapter", "v1/unload_lora_adapter")
    client = ("v1/completions", "v1/chat/completions")
    urls = [f"http://{stack['admin']}/{path}" for path in admin] + [f"http://{stack['http']}/{path}" for path in client]
    for name, value in {"URLS": json.dumps(urls), "PIN": json.dumps(json.dumps(pin)), "FORM": FORM}.items():
        script = script.replace(name, value)
    assert browser.evaluate(script) == "done"
    assert _pins(stack) == pinned
    assert _requests(stack) == before
    # A link from that page opens the dashboard.
    browser.evaluate(f"location.href = 'http://{stack['admin']}/'")
    browser.wait_for("document.querySelector('#status')?.innerText.startsWith('Last updated')")


def _pins(stack: dict[str, Any]) -> list[tuple[str, list[str]]]:
    found = httpx.get(f"http://{stack['admin']}/pins").json()["pins"]
    return [(one["id"], one["workers"]) for one in found]


def _requests(stack: dict[str, Any]) -> list[str]:
    found = httpx.get(f"http://{stack['admin']}/debug/requests?limit=200").json()["requests"]
    return [one["request_id"] for one in found]


def test_the_page_shows_that_the_gateway_is_gone(stack, browser: Chromium) -> None:
    browser.open(f"http://{stack['admin']}/")
    browser.wait_for("document.querySelector('#status')?.innerText.startsWith('Last updated')")
    os.kill(stack["pid"], signal.SIGTERM)
    text = browser.wait_for("document.querySelector('#status.lost') && document.querySelector('#status').innerText")
    assert text.startswith("Gateway not reachable")
    assert "the data is of" in text
    assert browser.evaluate("document.querySelector('#data').classList.contains('stale')")
