"""The chat page of a gateway in a real browser: answers, stopping, errors, keys, and text that pretends to be code."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from harness.fakes.scripted_answers import AnsweringApi, answering_api
from harness.fakes.scripted_gateway import scripted_gateway
from harness.servers.chromium import BINARY, Chromium, chromium
from harness.waiting import eventually

from kvferry.core.errors import Overloaded
from kvferry.gateway.decide.config import HttpConfig
from kvferry.text.answers.registry import CallFormat

pytestmark = pytest.mark.skipif(not BINARY.exists(), reason=f"needs {BINARY}: apt-get install chromium")

MARKUP = (
    "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
    "<b>bold</b> \u202e[link](javascript:0)"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with chromium() as running:
        yield running


@pytest.fixture
async def api() -> AsyncIterator[AnsweringApi]:
    async with answering_api(CallFormat.HERMES, has_reasoning=True, http=HttpConfig(address="127.0.0.1:0")) as serving:
        yield serving


async def visit(work: Callable[[], None]) -> None:
    """Run what blocks while it waits for the browser, and with it for the gateway of this process."""
    async with asyncio.timeout(120):
        await asyncio.to_thread(work)


def opened(browser: Chromium, url: str, *, width: int = 1280, is_dark: bool = False) -> None:
    """Open the page in a new tab's state, and wait until it is ready for a prompt."""
    browser.errors.clear()
    browser.look(width, 844, is_dark=is_dark)
    browser.open("about:blank")
    browser.wait_for("location.href === 'about:blank'")
    browser.open(f"{url.removesuffix('/v1')}/")
    browser.wait_for("!['Loading', '', undefined].includes(document.querySelector('#status')?.innerText)")


def send(browser: Chromium, prompt: str) -> None:
    """Type a prompt and press Enter."""
    browser.evaluate(
        f"document.querySelector('#prompt').value = {json.dumps(prompt)}; document.querySelector('#prompt').focus()"
    )
    browser.press("Enter", 13)


def answers(browser: Chromium, count: int) -> list[str]:
    """Return the texts of the answers when there are `count` and the last one has ended."""
    found = "[...document.querySelectorAll('.message:not(.user)')]"
    browser.wait_for(f"{found}.filter(one => one.getAttribute('aria-busy') === 'false').length === {count}")
    return list(browser.evaluate(f"{found}.map(one => one.innerText)"))


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
async def test_an_answer_and_its_times_are_shown(browser: Chromium, tmp_path: Path, width: int, is_dark: bool) -> None:
    shots = Path(os.environ.get("SHOTS", tmp_path))
    name = f"chat-{width}-{'dark' if is_dark else 'light'}"
    async with scripted_gateway() as gateway:

        def work() -> None:
            opened(browser, gateway.url, width=width, is_dark=is_dark)
            assert browser.evaluate("document.querySelector('#model').value") == "bytes"
            browser.screenshot(shots / f"{name}-idle.png")
            browser.evaluate("document.querySelector('#max-tokens').value = '12'")
            send(browser, "Some words.\nAnd more.")
            (text,) = answers(browser, 1)
            assert "12 generated" in text
            assert "TTFT" in text
            phases = browser.evaluate("document.querySelector('.waterfall').getAttribute('aria-label')")
            assert "Hand-off" in phases
            send(browser, "Once more.")
            answers(browser, 2)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width, "nothing is wider than the screen"
            assert browser.evaluate("document.activeElement.id") == "prompt"
            browser.screenshot(shots / f"{name}-answer.png")
            assert browser.errors == []

        await visit(work)


async def test_a_conversation_continues_and_its_reasoning_is_folded(api: AnsweringApi, browser: Chromium) -> None:
    def work() -> None:
        opened(browser, api.url)
        browser.evaluate("document.querySelector('#system').value = 'Be brief.'")
        browser.evaluate("document.querySelector('#temperature').value = '0.5'")
        api.source.answers = ["<think>weighing</think>first"]
        send(browser, "one")
        answers(browser, 1)
        assert browser.evaluate("document.querySelector('.reasoning').open") is False
        assert browser.evaluate("document.querySelector('.reasoning .text').textContent") == "weighing"
        assert browser.evaluate("document.querySelector('.message:not(.user) > .text').textContent") == "first"
        api.source.answers = ["second"]
        send(browser, "two")
        answers(browser, 2)
        assert api.source.prompt == "<system>Be brief.<user>one<assistant>first<user>two<assistant>"
        assert api.source.requests[-1].sampling.temperature == 0.5
        browser.evaluate("document.querySelector('#clear').click()")
        send(browser, "three")
        answers(browser, 1)
        assert api.source.prompt == "<system>Be brief.<user>three<assistant>"
        browser.evaluate("document.querySelector('#temperature').value = '-1'")
        send(browser, "refused")
        assert browser.evaluate("document.querySelector('#prompt').value") == "refused"
        assert browser.errors == []

    await visit(work)


@pytest.mark.parametrize("way", ["button", "Escape"])
async def test_stop_ends_the_request_and_keeps_the_text(api: AnsweringApi, browser: Chromium, way: str) -> None:
    source, loop = api.source, asyncio.get_running_loop()
    source.held, source.answers = asyncio.Event(), ["begun, and never ended"]

    def work() -> None:
        opened(browser, api.url)
        send(browser, "go")
        browser.wait_for("document.querySelector('.message:not(.user) .text')?.textContent === 'beg'")
        assert browser.evaluate("document.querySelector('#send').hidden")
        if way == "button":
            browser.evaluate("document.querySelector('#stop').click()")
        else:
            browser.press("Escape", 27)
        assert "Stopped" in answers(browser, 1)[0]
        asyncio.run_coroutine_threadsafe(eventually(lambda: source.num_open == 0), loop).result(20)
        source.held, source.answers = None, ["yes"]
        send(browser, "again?")
        answers(browser, 2)
        assert source.prompt == "<user>go<assistant>beg<user>again?<assistant>"
        assert browser.errors == []

    await visit(work)


async def test_markup_of_a_model_stays_text(api: AnsweringApi, browser: Chromium) -> None:
    api.source.answers = [f"<think>{MARKUP}</think>{MARKUP}"]

    def work() -> None:
        opened(browser, api.url)
        send(browser, MARKUP)
        assert answers(browser, 1)[0].count("<script>") == 1  # the reasoning is folded
        texts = browser.evaluate("[...document.querySelectorAll('.text')].map(one => one.textContent)")
        assert texts == [MARKUP] * 3
        assert (
            browser.evaluate(
                "document.querySelectorAll('#messages img, #messages script, #messages b, #messages a').length"
            )
            == 0
        )
        assert browser.evaluate("document.title") == "kvferry chat"
        call = {"index": 0, "function": {"name": MARKUP, "arguments": MARKUP}}
        script = f"""import('/page/messages.js').then(({{AnswerElement}}) => {{
          const shown = new AnswerElement({json.dumps(MARKUP)});
          shown.add({{choices: [{{delta: {{tool_calls: [{json.dumps(call)}]}}, finish_reason: 'length'}}]}});
          shown.end({{error: {json.dumps(MARKUP)}}});
          document.querySelector('#messages').append(shown.element);
          const made = shown.element.querySelectorAll('img, script, b, a');
          return [made.length, shown.element.querySelector('code').textContent];
        }})"""
        assert browser.evaluate(script) == [0, f"{MARKUP} {MARKUP}"]
        assert browser.evaluate("document.title") == "kvferry chat"
        assert browser.errors == []

    await visit(work)


async def test_a_failed_turn_is_shown_in_place_and_not_kept(api: AnsweringApi, browser: Chromium) -> None:
    api.source.answers = ["yes"]

    def work() -> None:
        opened(browser, api.url)
        api.source.error = Overloaded("the gateway is full", retry_after_seconds=2.0)
        send(browser, "go")
        assert "the gateway is full. Send the prompt again in 2 s." in answers(browser, 1)[0]
        assert browser.evaluate("document.querySelector('#prompt').value") == "go"
        api.source.error = None
        browser.press("Enter", 13)
        answers(browser, 2)
        assert api.source.prompt == "<user>go<assistant>"

    await visit(work)


async def test_a_key_is_asked_for_when_it_is_needed_and_kept_in_the_tab_alone(
    browser: Chromium, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-of-the-tests tests\n")
    http = HttpConfig(address="127.0.0.1:0", api_keys_file=keys)
    async with scripted_gateway() as open_gateway, scripted_gateway(http=http) as gateway:

        def work() -> None:
            opened(browser, open_gateway.url)
            assert browser.evaluate("document.querySelector('#key-fields').hidden")
            opened(browser, gateway.url)
            assert not browser.evaluate("document.querySelector('#key-fields').hidden")
            assert browser.evaluate("document.activeElement.id") == "key"
            assert "Enter an API key" in browser.evaluate("document.querySelector('#status').innerText")
            browser.evaluate(
                "document.querySelector('#key').value = 'key-of-the-tests';"
                "document.querySelector('#key').dispatchEvent(new Event('change'))"
            )
            browser.wait_for("document.querySelector('#model').value === 'bytes'")
            send(browser, "hi")
            assert "generated" in answers(browser, 1)[0]
            kept = browser.evaluate("[Object.values(sessionStorage), localStorage.length, document.cookie]")
            assert kept == [["key-of-the-tests"], 0, ""]

        await visit(work)


async def test_an_answer_that_is_cut_is_an_error(browser: Chromium) -> None:
    async with answering_api(CallFormat.HERMES, http=HttpConfig(address="127.0.0.1:0")) as api:

        def work() -> None:
            opened(browser, api.url)
            script = """import('/page/api.js').then(async ({answer}) => {
              const data = 'data: {"choices": [{"delta": {"content": "a"}}]}\\n\\n';
              const end = 'data: [DONE]\\n\\n', failed = 'data: {"error": {"message": "lost"}}\\n\\n';
              const sent = [data, end.slice(0, -1), 'data: {\\n\\n', failed, data + end];
              const real = window.fetch;
              const said = [];
              for (const body of sent) {
                window.fetch = async () => new Response(body, {status: 200});
                const asked = answer({}, new AbortController(), () => {});
                said.push(await asked.then(() => 'whole', (error) => error.message));
              }
              window.fetch = real;
              return said;
            })"""
            cut, half, damaged, lost, whole = browser.evaluate(script)
            assert cut == half == "The answer was cut before its end. Send the prompt again."
            assert damaged.startswith("The answer was cut (")
            assert lost == "lost. Send the prompt again."
            assert whole == "whole"

        await visit(work)
