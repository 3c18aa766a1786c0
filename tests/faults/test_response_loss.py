"""Stored responses whose gateway is killed, and a Redis that loses them: what is stored is read and continued
elsewhere, what was being created has failed by name, and nothing hangs."""

import signal
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from harness.idle import assert_workers_idle
from harness.servers.gateway_pool import SECONDS, GatewayPool, gateway_pool, http, metric
from harness.servers.processes import RunningProcess
from harness.servers.redis_server import redis_server
from harness.waiting import until

FAILURES = 'kvferry_gateway_response_store_failures_total{reason="unreachable"}'
LONG: dict[str, Any] = {"max_output_tokens": 4000, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def pool() -> Iterator[GatewayPool]:
    with gateway_pool() as started:
        yield started
        assert_workers_idle([str(started.worker.events["listening"]["admin"])])


@pytest.fixture(scope="module")
def lasting(pool: GatewayPool) -> Iterator[RunningProcess]:
    """A gateway that is not killed."""
    with pool.gateway() as process:
        yield process


def client(process: RunningProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{http(process)}/v1", api_key="any", max_retries=0, timeout=SECONDS)


def say(process: RunningProcess, text: str, **more: Any) -> Any:
    with client(process) as api:
        return api.responses.create(
            **{"model": "tiny", "input": text, "max_output_tokens": 8, "temperature": 0, **more}
        )


def begun(process: RunningProcess, **more: Any) -> str:
    """Begin a long response in the background; return its id when it has output."""
    name = say(process, "abc", background=True, **LONG, **more).id
    with client(process) as api:
        until(lambda: bool(api.responses.retrieve(name).output), "the response has output")
    return str(name)


def status(process: RunningProcess, name: str) -> str | None:
    with client(process) as api:
        return api.responses.retrieve(name).status


def test_a_response_of_a_killed_gateway_is_read_and_continued(pool: GatewayPool, lasting: RunningProcess) -> None:
    with pool.gateway() as victim:
        first = say(victim, "hello", store=True)
        second = say(victim, "more", previous_response_id=first.id)
        victim.process.kill()
        assert victim.process.wait(SECONDS) == -signal.SIGKILL
    with client(lasting) as api:
        assert api.responses.retrieve(second.id) == second
        assert [item.content[0].text for item in api.responses.input_items.list(second.id)] == ["more"]  # type: ignore[union-attr]
    third = say(lasting, "again", previous_response_id=second.id)
    whole = [
        {"role": "user", "content": "hello"}, *first.output, {"role": "user", "content": "more"}, *second.output,
        {"role": "user", "content": "again"},
    ]  # fmt: skip
    assert say(lasting, whole).output_text == third.output_text, "the conversation is the one that was sent"  # type: ignore[arg-type]
    with client(lasting) as api:
        api.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            say(lasting, "again", previous_response_id=second.id)
    say(lasting, "again", previous_response_id=third.id)


def test_a_response_in_the_background_of_a_killed_gateway_has_failed(
    pool: GatewayPool, lasting: RunningProcess
) -> None:
    with pool.gateway() as victim:
        name = begun(victim)
        assert status(lasting, name) in ("queued", "in_progress")
        with client(lasting) as api, pytest.raises(openai.BadRequestError, match="until it has ended"):
            api.responses.retrieve(name, stream=True)
        victim.process.kill()
        assert victim.process.wait(SECONDS) == -signal.SIGKILL
    until(lambda: status(lasting, name) == "failed", "its lease has ended")
    with client(lasting) as api:
        failed = api.responses.retrieve(name)
        assert failed.error is not None
        assert "has ended before it was complete" in failed.error.message
        assert api.responses.cancel(name) == failed


def test_a_response_is_cancelled_and_deleted_at_a_gateway_that_does_not_create_it(
    pool: GatewayPool, lasting: RunningProcess
) -> None:
    with pool.gateway() as other:
        cancelled, deleted = begun(other, stream=False), begun(other)
        with client(lasting) as api:
            found = api.responses.cancel(cancelled)
            assert (found.status, bool(found.output_text)) == ("cancelled", True)
            api.responses.delete(deleted)
            with pytest.raises(openai.NotFoundError):
                api.responses.retrieve(deleted)
        until(lambda: not metric(other, "kvferry_gateway_streams_open"), "both have ended")
        assert status(other, cancelled) == "cancelled"


def test_a_gateway_that_drains_stores_what_it_ends(pool: GatewayPool, lasting: RunningProcess) -> None:
    with pool.gateway("", "--drain-seconds", "0.1") as victim:
        name = begun(victim)
        victim.process.terminate()
        assert victim.process.wait(SECONDS) == 0
    assert status(lasting, name) == "cancelled"


def test_processes_of_one_gateway_share_their_responses(pool: GatewayPool) -> None:
    with pool.gateway("", "--processes", "2") as gateway:
        name = say(gateway, "hello").id
        for _ in range(8):  # each client opens a connection, to either process
            say(gateway, "more", previous_response_id=name)


def test_without_redis_what_needs_it_is_refused_and_the_rest_goes_on(pool: GatewayPool) -> None:
    with redis_server() as redis, pool.gateway(f"redis://127.0.0.1:{redis.port}/0") as gateway:
        stored, running = say(gateway, "hello"), begun(gateway)
        assert stored.model_extra["store"] is True
        redis.kill()
        with client(gateway) as api:
            with pytest.raises(openai.InternalServerError, match="store false") as refused:
                api.responses.retrieve(stored.id)
            assert (refused.value.status_code, refused.value.code) == (503, "responses_unavailable")
            for more in ({"store": True}, {"previous_response_id": stored.id}, {"background": True}):
                with pytest.raises(openai.InternalServerError, match="neither stored nor read"):
                    say(gateway, "hello", **more)
            assert say(gateway, "hello").model_extra["store"] is False
            assert say(gateway, "hello", store=False).output_text == stored.output_text
            with api.responses.stream(model="tiny", input="hello", max_output_tokens=8, temperature=0) as events:
                last = list(events)[-1]
            assert (last.type, last.response.model_extra["store"]) == ("response.incomplete", False)  # type: ignore[union-attr]
            assert api.responses.retrieve(running).output, "a running response is read where it runs"
        assert metric(gateway, FAILURES) >= 4
        with redis_server(port=redis.port):
            until(lambda: say(gateway, "hello").model_extra["store"], "responses are stored again")
            with client(gateway) as api:
                with pytest.raises(openai.NotFoundError):
                    api.responses.retrieve(stored.id)
                # Its record is gone, as if it had been deleted: its gateway ends it.
                until(lambda: httpx.get(f"{api.base_url}responses/{running}").status_code == 404, "it has ended")
