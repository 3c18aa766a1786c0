"""`kvferry chat` as people and scripts use it: in a terminal and in pipes, against gateways that answer and fail."""

import asyncio
import json
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from harness.fakes.scripted_answers import AnsweringApi, answering_api
from harness.fakes.scripted_gateway import scripted_gateway
from harness.servers.processes import running
from harness.servers.terminal import CTRL_C, CTRL_D, UP, terminal
from harness.waiting import eventually

from kvferry.core.errors import GenerationFailed, Overloaded
from kvferry.core.process.config import child_environment
from kvferry.gateway.decide.config import HttpConfig
from kvferry.text.answers.registry import CallFormat

PROMPT = "\n> "
SECONDS = 120.0


@pytest.fixture
async def api() -> AsyncIterator[AnsweringApi]:
    async with answering_api(CallFormat.HERMES, has_reasoning=True, http=HttpConfig(address="127.0.0.1:0")) as serving:
        yield serving


async def run(*arguments: str, given: bytes | None = None, **environment: str) -> tuple[int, str, str]:
    """Run `kvferry chat` without a terminal; return its status, output and errors."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvferry.cli.main", "chat", *arguments),
        stdin=asyncio.subprocess.DEVNULL if given is None else asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=child_environment(environment),
    )
    async with asyncio.timeout(SECONDS):
        output, errors = await process.communicate(given)
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def test_piped_text_gets_the_answer_alone(api: AnsweringApi) -> None:
    api.source.answers = ["<think>hm</think>\x1b]0;title\x07Grüße\n\u202eto you"]
    assert await run("--url", api.url, given=b"hi\n") == (0, "]0;titleGrüße\nto you\n", "")
    assert api.source.prompt == "<user>hi<assistant>"


async def test_a_prompt_and_its_settings_reach_the_gateway(api: AnsweringApi) -> None:
    api.source.answers = ["ok"]
    settings = ("--system", "Be brief.", "--temperature", "0.5", "--max-tokens", "7", "--model", "bytes")
    assert await run("hello", "--url", api.url.removeprefix("http://"), *settings) == (0, "ok\n", "")
    assert api.source.prompt == "<system>Be brief.<user>hello<assistant>"
    sampling = api.source.requests[-1].sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.5, 7)


async def test_errors_of_scripts_have_a_status_and_the_remedy(api: AnsweringApi, tmp_path: Path) -> None:
    status, output, errors = await run("hi", "--url", api.url, "--model", "other")
    assert (status, output) == (2, "")
    assert errors.count("\n") == 1
    assert "'other' is not served here" in errors
    assert "leave out --model" in errors
    assert (await run("hi", "--url", "http://127.0.0.1:1"))[::2] == (
        1,
        "kvferry: http://127.0.0.1:1 cannot be reached (Connection refused); start a gateway, or set --url\n",
    )
    assert (await run("--url", api.url, given=b" \n"))[0] == 2
    assert "not UTF-8" in (await run("--url", api.url, given=b"\xff"))[2]
    api.source.answers = ["never given"]
    api.source.error = GenerationFailed("no token could be sampled")
    status, output, errors = await run("hi", "--url", api.url)
    assert (status, output) == (1, "")
    assert "no token could be sampled; try again (request req-" in errors


async def test_an_api_key_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    keys, key = tmp_path / "keys", tmp_path / "key"
    keys.write_text("key-of-the-tests tests\n")
    key.write_text("key-of-the-tests\n")
    async with scripted_gateway(http=HttpConfig(address="127.0.0.1:0", api_keys_file=keys)) as gateway:
        asked = ("hi", "--url", gateway.url, "--max-tokens", "3")
        status, _, errors = await run(*asked)
        assert status == 1
        assert "set KVFERRY_API_KEY or --api-key-file" in errors
        assert (await run(*asked, KVFERRY_API_KEY="key-of-the-tests"))[0] == 0
        assert (await run(*asked, "--api-key-file", str(key)))[0] == 0
        status, _, errors = await run(*asked, KVFERRY_API_KEY="another-key-than-that")
        assert status == 1
        assert "another-key" not in errors


async def test_a_chat_in_a_terminal(api: AnsweringApi, tmp_path: Path) -> None:
    source, saved, taken = api.source, tmp_path / "chat.json", tmp_path / "taken"
    taken.write_text("important")

    def talk() -> int:
        with terminal("chat", "--url", api.url, "--system", "S", env={"XDG_CACHE_HOME": str(tmp_path)}) as person:
            person.until("/help lists the commands")
            person.until(PROMPT)

            def say(text: str, answer: str = "") -> str:
                if answer:
                    source.answers = [answer]
                person.keys(f"{text}\n")
                return person.until(PROMPT)

            shown = say("one", "<think>hm\x1b[31m</think>\x1b]0;title\x07\x1b[2Jfirst")
            assert "\x1b[2mhm[31m\x1b[0m" in shown
            assert "]0;title[2Jfirst" in shown
            assert " prompt tokens (0 cached), " in shown
            assert "TTFT" in shown
            say("two \\\nlines", "second")
            assert source.prompt.startswith("<system>S<user>one<assistant>")
            assert source.prompt.endswith("first<user>two \nlines<assistant>")
            # A turn that fails is not kept, and can be sent again.
            source.error = Overloaded("the gateway is full", retry_after_seconds=2.0)
            failed = say("three")
            assert "kvferry: the gateway is full; try again in 2 s" in failed
            source.error = None
            say("/retry", "third")
            assert source.prompt.count("three") == 1
            assert "remain" in say("/undo")
            say("four", "fourth")
            assert "three" not in source.prompt
            say("/system")
            say("/retry", "fifth")
            assert source.prompt.startswith("<user>one")
            assert source.prompt.count("four") == 1
            assert "no command /what" in say("/what")
            assert "where the time went" not in say("/stats")
            assert "wrote 6 messages" in say(f"/save {saved}")
            assert "wrote 6 messages" in say(f"/save {saved}")
            assert "exists; use another name" in say(f"/save {taken}")
            assert "forgotten" in say("/clear")
            say("//slash", "sixth")
            assert source.prompt == "<user>/slash<assistant>"
            person.keys(UP)
            person.until("//slash")
            person.keys("\x15")  # empties the line
            status = person.end(CTRL_D)
            assert b"\x1b]0" not in person.shown
            assert b"\x1b[2J" not in person.shown
            return status

    assert await asyncio.to_thread(talk) == 0
    assert [one["role"] for one in json.loads(saved.read_text())] == ["user", "assistant"] * 3
    assert taken.read_text() == "important"
    history = tmp_path / "kvferry" / "chat-history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert history.read_text().startswith("one\ntwo \\\nlines\nthree\n")


async def test_ctrl_c_stops_an_answer_and_keeps_the_chat(api: AnsweringApi, tmp_path: Path) -> None:
    source, held = api.source, asyncio.Event()
    source.held, source.answers = held, ["begun, and never ended"]
    loop = asyncio.get_running_loop()

    def talk() -> int:
        with terminal("chat", "--url", api.url, "--no-stats", env={"XDG_CACHE_HOME": str(tmp_path)}) as person:
            person.until(PROMPT)
            person.keys("go\n")
            person.until("beg")
            person.keys(CTRL_C)
            assert "the text so far is kept" in person.until(PROMPT)
            asyncio.run_coroutine_threadsafe(eventually(lambda: source.num_open == 0), loop).result(SECONDS)
            source.answers, source.held = ["yes"], None
            person.keys("again?\n")
            assert "TTFT" not in person.until(PROMPT)
            assert source.prompt == "<user>go<assistant>beg<user>again?<assistant>"
            return person.end(CTRL_C)

    assert await asyncio.to_thread(talk) == 0


def test_a_real_stack_says_where_the_time_went(tmp_path: Path) -> None:
    addresses = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-level", "error")
    engine = ("--model", "tiny", "--dtype", "float32", "--kv-memory", "16MiB")
    with running("up", *engine, "--json", *addresses) as stack:
        url = f"http://{stack.wait_for('ready')['http']}/v1"
        with terminal("chat", "--url", url, "--max-tokens", "8", env={"XDG_CACHE_HOME": str(tmp_path)}) as person:
            person.until("tiny at ")
            person.until(PROMPT)
            person.keys("hello\n")
            assert " tokens/s, " in person.until(PROMPT)
            person.keys("/stats\n")
            shown = person.until(PROMPT)
            assert [
                word for word in ("queue", "prefill", "first token", "hand-off", "decode") if word not in shown
            ] == []
            person.keys("/exit\n")
            assert person.end() == 0
