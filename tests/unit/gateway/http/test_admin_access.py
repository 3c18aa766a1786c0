"""Changes by the admin API: tokens, addresses, the log."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from harness.fakes.scripted_gateway import ScriptedGateway, scripted_gateway

from kvferry.core.errors import UsageError
from kvferry.gateway.http.admin_access import AdminAccess, ChangesOff, read_tokens

TOKEN, OTHER = "token-of-the-first-administrator", "token-of-the-second-administrator"
RESET = "/reset_prefix_cache"


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=20) as opened:
        yield opened


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# administrators\n{TOKEN} ann\n\n{OTHER}\n")
    return path


def admin_url(gateway: ScriptedGateway) -> str:
    return gateway.admin_url.replace("0.0.0.0", "127.0.0.1")


def routes(gateway: ScriptedGateway) -> list[tuple[str, str]]:
    """Return method and path of all routes of the admin port."""
    served = gateway.gateway.parts.admin_api.routes()
    return [
        (method, route.path.replace("{", "").replace("}", "")) for route in served for method in route.methods or ()
    ]


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.mark.parametrize("address", ["127.0.0.1:0", "0.0.0.0:0"])
async def test_every_change_needs_a_token_and_reading_does_not(
    file: Path, client: httpx.AsyncClient, address: str
) -> None:
    async with scripted_gateway(admin_address=address, admin_token_file=file) as gateway:
        changes = 0
        for method, path in routes(gateway):
            if method in ("GET", "HEAD"):
                assert (await client.request(method, admin_url(gateway) + path)).status_code in (200, 404), path
                continue
            changes += 1
            wrong = (bearer("x" * 32), bearer(TOKEN[:-1])) if changes <= 4 else ()  # more would be too many
            for headers in ({}, {"authorization": f"Basic {TOKEN}"}, *wrong):
                refused = await client.request(method, admin_url(gateway) + path, headers=headers)
                assert refused.status_code == 401, path
                assert refused.headers["www-authenticate"] == "Bearer"
                assert "--admin-token-file" in refused.json()["error"]["message"]
            granted = await client.request(method, admin_url(gateway) + path, headers=bearer(TOKEN))
            assert granted.status_code not in (401, 403), path
        assert changes == 11
        assert [worker.num_resets for worker in gateway.workers.all] == [2, 2], "one of them by /pause"


async def test_guessed_tokens_are_limited_and_the_right_one_still_passes(
    file: Path, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_gateway(admin_token_file=file) as gateway:
        url = admin_url(gateway) + RESET
        assert (await client.post(url, headers=bearer(TOKEN))).status_code == 200
        answers = [await client.post(url, headers=bearer(f"{number:020}")) for number in range(40)]
        assert [answer.status_code for answer in answers] == [401] * 10 + [429] * 30
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 60
        assert (await client.post(url, headers=bearer(TOKEN))).status_code == 200, "used before from this address"
        assert (await client.post(url, headers=bearer(OTHER))).status_code == 429
    refused = [record for record in caplog.records if "change refused" in record.message]
    assert len(refused) == 11, "guesses do not fill the log"


async def test_an_address_that_is_not_loopback_needs_a_file(client: httpx.AsyncClient) -> None:
    async with scripted_gateway(admin_address="0.0.0.0:0") as gateway:
        for method, path in routes(gateway):
            answer = await client.request(method, admin_url(gateway) + path, headers=bearer(TOKEN))
            if method in ("GET", "HEAD"):
                assert answer.status_code in (200, 404), path
            else:
                assert answer.status_code == 403, path
                assert answer.json()["error"]["code"] == "changes_not_allowed"
                assert "--admin-token-file" in answer.json()["error"]["message"]
        assert [worker.num_resets for worker in gateway.workers.all] == [0, 0]


async def test_each_change_is_logged_with_its_maker_and_without_the_token(
    file: Path, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)  # the log of changes does not depend on --log-level
    caplog.handler.setLevel(logging.NOTSET)
    async with scripted_gateway() as local:
        assert (await client.post(local.admin_url + RESET)).status_code == 200
    async with scripted_gateway(admin_token_file=file) as gateway:
        url = gateway.admin_url
        for token in (TOKEN, OTHER, "x" * 32):
            await client.post(url + RESET, headers=bearer(token))
        await client.post(f"{url}/v1/unload_lora_adapter", json={"a": 1}, headers=bearer(TOKEN))
        await client.post(f"{url}/a%0Achange by eve", headers=bearer(TOKEN))
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("change")]
    assert lines == [
        f"change by loopback: POST {RESET!r}: 200",
        f"change by ann: POST {RESET!r}: 200",
        f"change by token: POST {RESET!r}: 200",
        f"change refused: POST {RESET!r}: UNAUTHENTICATED",
        "change by ann: POST '/v1/unload_lora_adapter': 400",
        r"change by ann: POST '/a\nchange by eve': 404",
    ]
    assert TOKEN not in caplog.text
    assert OTHER not in caplog.text
    assert "x" * 32 not in caplog.text


async def test_the_file_is_read_for_each_change(
    tmp_path: Path, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tokens"
    async with scripted_gateway(admin_token_file=file) as gateway:
        assert "the admin port refuses changes: cannot read the tokens" in caplog.text
        refused = await client.post(gateway.admin_url + RESET, headers=bearer(TOKEN))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "changes_not_allowed")
        await asyncio.to_thread(file.write_text, f"{TOKEN}\n")
        assert (await client.post(gateway.admin_url + RESET, headers=bearer(TOKEN))).status_code == 200
        await asyncio.to_thread(file.write_text, f"{OTHER}\n")
        assert (await client.post(gateway.admin_url + RESET, headers=bearer(TOKEN))).status_code == 401


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no token"),
        ("# nothing\n", "has no token"),
        ("short\n", "line 1 of"),
        (f"{TOKEN}\n{OTHER} two names\n", "line 2 of"),
        (f"{TOKEN} na\x07me\n", "line 1 of"),
    ],
)
def test_an_invalid_file_is_refused_without_its_text(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(UsageError, match=words) as refused:
        read_tokens(path)
    assert OTHER not in refused.value.message
    assert refused.value.field == "admin_token_file"


@pytest.mark.parametrize("is_local", [True, False])
async def test_a_file_that_cannot_be_read_permits_no_change(tmp_path: Path, is_local: bool) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ChangesOff, match="--admin-token-file"):
            await AdminAccess(is_local, path).name_of(None, "")
