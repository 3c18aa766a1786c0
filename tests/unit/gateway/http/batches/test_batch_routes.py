"""OpenAI's client and raw requests against the routes of files and batches."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from harness.fakes.scripted_gateway import ScriptedGateway, scripted_gateway
from harness.waiting import eventually

from kvferry.gateway.batches.batch_service import MAX_UPLOADS
from kvferry.gateway.decide.config import BatchConfig, HttpConfig

CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 1},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3, "seed": 1},
    "/v1/embeddings": {"input": "hi"},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3, "seed": 1},
}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[ScriptedGateway]:
    keys = tmp_path / "keys"
    keys.write_text("key-a a\nkey-b b\n")
    http = HttpConfig(address="127.0.0.1:0", api_keys_file=keys)
    batches = BatchConfig(tmp_path / "batches", max_file_bytes=1 << 20, tenant_file_bytes=4 << 20, tenant_files=8)
    async with scripted_gateway(http=http, batches=batches) as running:
        yield running


@pytest.fixture
async def client(gateway: ScriptedGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="key-a", max_retries=0) as opened:
        yield opened


@pytest.fixture
async def http(gateway: ScriptedGateway) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": "Bearer key-a"}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20, headers=headers) as opened:
        yield opened


def lines(path: str, count: int = 3, **changes: Any) -> bytes:
    made = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": path,
            "body": {"model": "bytes", **BODIES[path], **changes},
        }
        for number in range(count)
    ]
    return "\n".join(map(json.dumps, made)).encode()


async def finished(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    async with asyncio.timeout(20):
        while (found := await client.batches.retrieve(batch_id)).status not in ("completed", "failed", "cancelled"):
            pass
    return found


async def start(client: openai.AsyncOpenAI, content: bytes, endpoint: Any = CHAT) -> Any:
    file = await client.files.create(file=("lines.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


def left(gateway: ScriptedGateway) -> list[str]:
    """Return the names of files that an upload left behind."""
    folder = gateway.gateway.parts.config.batches
    assert folder is not None
    return [path.name for path in (*folder.folder.glob("uploads/*"), *folder.folder.glob("files/*"))]


@pytest.mark.parametrize("path", BODIES)
async def test_lines_have_the_answers_of_requests(gateway, client, http, path):
    done = await finished(client, (await start(client, lines(path), path)).id)
    assert (done.status, done.request_counts.completed, done.request_counts.total) == ("completed", 3, 3)
    content = (await client.files.content(done.output_file_id)).text
    results = {result["custom_id"]: result for result in map(json.loads, content.splitlines())}
    assert sorted(results) == ["r0", "r1", "r2"]
    own = (await http.post(path, json={"model": "bytes", **BODIES[path]})).json()
    for result in results.values():
        body = result["response"]["body"]
        assert result["response"]["request_id"].startswith("req-")
        for name in ("choices", "data"):
            if name in own:
                assert body[name] == own[name]
        if "output" in own:
            assert body["output"][0]["content"] == own["output"][0]["content"]
            assert body["store"] is False, "responses of batches would displace those of all others"


async def test_files_of_the_client(client):
    file = await client.files.create(
        file=('möin "x".jsonl', b"{}\n"),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (file.bytes, file.purpose, file.expires_at - file.created_at) == (3, "batch", 3600)
    assert (await client.files.retrieve(file.id)).filename == file.filename
    assert (await client.files.content(file.id)).content == b"{}\n"
    more = [(await client.files.create(file=b"x", purpose="batch")).id for _ in range(2)]
    assert [found.id async for found in client.files.list(limit=1, order="asc")] == [file.id, *more]
    assert (await client.files.delete(file.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.content(file.id)


async def test_another_tenant_finds_nothing(gateway, client):
    batch = await start(client, lines(CHAT, 1))
    await finished(client, batch.id)
    async with client.with_options(api_key="key-b") as other:
        assert [found async for found in other.files.list()] == []
        assert [found async for found in other.batches.list()] == []
        calls = [
            (other.files.retrieve, batch.input_file_id, "file-0"),
            (other.files.content, batch.input_file_id, "file-0"),
            (other.files.delete, batch.input_file_id, "file-0"),
            (other.batches.retrieve, batch.id, "batch_0"),
            (other.batches.cancel, batch.id, "batch_0"),
        ]
        for call, foreign, unknown in calls:
            texts = []
            for name in (foreign, unknown):
                with pytest.raises(openai.NotFoundError) as refused:
                    await call(name)
                texts.append(refused.value.message.replace(name, "ID"))
            assert texts[0] == texts[1]
        with pytest.raises(openai.NotFoundError):
            await other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
        with pytest.raises(openai.NotFoundError):
            [found async for found in other.files.list(after=batch.input_file_id)]


async def test_a_bad_line_fails_the_batch_with_its_number(client):
    content = lines(CHAT, 2) + b"\n{bad\n" + lines(CHAT, 1)
    done = await finished(client, (await start(client, content)).id)
    assert done.status == "failed"
    assert [(error.code, error.line) for error in done.errors.data] == [
        ("invalid_json_line", 3),
        ("duplicate_custom_id", 4),
    ]
    assert (done.output_file_id, done.error_file_id) == (None, None)


async def test_a_model_that_is_not_served_fails_the_batch(client):
    done = await finished(client, (await start(client, lines(CHAT, 1, model="other"))).id)
    assert [(error.code, error.param) for error in done.errors.data] == [("model_not_found", "body.model")]


async def test_lines_have_the_lowest_priority(gateway, client):
    await finished(client, (await start(client, lines(CHAT, 1, priority=-5))).id)
    async with httpx.AsyncClient() as admin:
        metrics = (await admin.get(f"{gateway.admin_url}/metrics")).text
    assert 'kvferry_gateway_queue_seconds_count{band="low"} 1.0' in metrics
    assert 'kvferry_gateway_batch_lines_total{outcome="completed"} 1.0' in metrics
    assert 'kvferry_gateway_batches_total{state="completed"} 1.0' in metrics


async def test_a_cancelled_batch_leaves_nothing_in_flight(gateway, client):
    batch = await start(client, lines(CHAT, 50, max_tokens=4000, ignore_eos=True))
    await eventually(lambda: gateway.gateway.dispatcher.open_streams > 0)
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    done = await finished(client, batch.id)
    assert (done.status, done.request_counts.completed + done.request_counts.failed) == ("cancelled", 50)
    await gateway.idle()  # assert_idle of the scripted stack
    with pytest.raises(openai.ConflictError):
        await client.batches.cancel((await finished(client, (await start(client, lines(CHAT, 1))).id)).id)


WRONG_FORMS: list[tuple[dict[str, Any], str | None]] = [
    ({"data": {"purpose": "user_data"}, "files": {"file": b"x"}}, "purpose"),
    ({"data": {"purpose": ["batch", "batch"]}, "files": {"file": b"x"}}, "purpose"),
    ({"data": {"purpose": "batch", "a": ["b", "c"]}, "files": {"file": b"x"}}, "a"),
    ({"data": {"purpose": "batch"}}, None),
    ({"data": {"purpose": "batch", "a": "b"}, "files": {"b": b"x"}}, "file"),
    ({"files": {"file": b"x"}}, "purpose"),
    ({"data": {"purpose": "batch", "expires_after[anchor]": "x"}, "files": {"file": b"x"}}, "expires_after"),
    ({"data": {"purpose": "batch", "expires_after[seconds]": "5"}, "files": {"file": b"x"}}, "expires_after"),
    ({"data": {"purpose": "batch", "a": "x" * 5000}, "files": {"file": b"x"}}, "a"),
    ({"data": {"purpose": "batch"}, "files": [("file", b"x"), ("file", b"x")]}, "file"),
]


async def test_a_wrong_form_is_refused_by_name_and_leaves_nothing(gateway, http):
    for form, field in WRONG_FORMS:
        answer = await http.post("/v1/files", **form)
        assert answer.status_code == (400 if field is not None else 415), answer.text
        assert (answer.json()["error"]["param"] or "").partition(".")[0] == (field or "")
        assert left(gateway) == []


@pytest.mark.parametrize("query", ["limit=1&limit=2", "after=a&after=b", "other=1"])
@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
async def test_parameters_that_are_unknown_or_given_twice_are_refused(http, path, query):
    answer = await http.get(f"{path}?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


async def test_unknown_fields_of_a_form_are_named(http):
    answer = await http.post("/v1/files", data={"purpose": "batch", "extra": "1"}, files={"file": b"x"})
    assert (answer.status_code, answer.headers["kvferry-ignored"]) == (200, "extra")


@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_file_that_is_too_large_is_refused_and_leaves_nothing(gateway, http, is_declared):
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'

    async def body() -> AsyncIterator[bytes]:
        yield head
        for _ in range(20):
            yield b"x" * (128 << 10)

    headers = {"content-type": "multipart/form-data; boundary=b"}
    if is_declared:
        headers["content-length"] = str(1 << 30)
        headers["expect"] = "100-continue"
    answer = (
        await http.post("/v1/files", content=body(), headers=headers)
        if not is_declared
        else await declared(gateway, head, headers)
    )
    assert answer.status_code == 413
    assert "max_file_bytes" in answer.json()["error"]["message"]
    assert left(gateway) == []


async def declared(gateway: ScriptedGateway, head: bytes, headers: dict[str, str]) -> httpx.Response:
    """Declare a large body, send its begin only, and return the answer."""
    reader, writer = await asyncio.open_connection(*gateway.gateway.listening.http.split(":"))
    fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items() if name != "expect")
    writer.write(
        f"POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer key-a\r\n{fields}\r\n".encode() + head
    )
    async with asyncio.timeout(10):
        raw = await reader.read()
    writer.close()
    await writer.wait_closed()
    top, _, body = raw.partition(b"\r\n\r\n")
    return httpx.Response(int(top.split()[1]), content=body)


async def test_a_client_that_disconnects_or_cuts_its_form_leaves_nothing(gateway, http):
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nxxx'
    answer = await http.post("/v1/files", content=head, headers={"content-type": "multipart/form-data; boundary=b"})
    assert answer.status_code == 400
    assert "ends before" in answer.json()["error"]["message"]
    _, writer = await asyncio.open_connection(*gateway.gateway.listening.http.split(":"))
    writer.write(
        b"POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer key-a\r\ncontent-length: 1000\r\n"
        b"content-type: multipart/form-data; boundary=b\r\n\r\n" + head
    )
    await eventually(lambda: bool(left(gateway)))
    writer.close()
    await eventually(lambda: not left(gateway))


async def test_uploads_at_a_time_and_files_of_a_tenant_are_bounded(gateway, http, client):
    writers = []
    for _ in range(MAX_UPLOADS):
        _, writer = await asyncio.open_connection(*gateway.gateway.listening.http.split(":"))
        writer.write(
            b"POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer key-a\r\ncontent-length: 1000\r\n"
            b"content-type: multipart/form-data; boundary=b\r\n\r\n"
        )
        writers.append(writer)
    await eventually(lambda: len(left(gateway)) == MAX_UPLOADS)
    answer = await http.post("/v1/files", data={"purpose": "batch"}, files={"file": b"x"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
    for writer in writers:
        writer.close()
    await eventually(lambda: not left(gateway))
    for _ in range(8):
        await client.files.create(file=b"x", purpose="batch")
    with pytest.raises(openai.RateLimitError, match="tenant_files"):
        await client.files.create(file=b"x", purpose="batch")


WRONG_BATCHES: list[tuple[dict[str, Any], str]] = [
    ({"endpoint": "/v1/messages"}, "endpoint"),
    ({"completion_window": "1h"}, "completion_window"),
    ({"input_file_id": 7}, "input_file_id"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, "output_expires_after.seconds"),
]


async def test_a_wrong_field_of_a_batch_is_refused_by_name(http):
    for changes, field in WRONG_BATCHES:
        body = {"input_file_id": "file-0", "endpoint": CHAT, "completion_window": "24h", **changes}
        answer = await http.post("/v1/batches", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_a_gateway_without_a_folder_names_the_setting(tmp_path):
    (tmp_path / "file").write_text("")
    async with scripted_gateway() as off, httpx.AsyncClient(base_url=off.url) as http:
        answer = await http.get("/v1/batches")
        assert (answer.status_code, answer.json()["error"]["code"]) == (501, "batches_off")
        assert "batch_folder" in answer.json()["error"]["message"]
    unusable = BatchConfig(tmp_path / "file" / "inner")
    async with scripted_gateway(batches=unusable) as broken, httpx.AsyncClient(base_url=broken.url) as http:
        for answer in (
            await http.get("/v1/files"),
            await http.post("/v1/files", data={"purpose": "batch"}, files={"file": b"x"}),
        ):
            assert (answer.status_code, answer.json()["error"]["param"]) == (503, "batch_folder")


async def test_lines_take_half_of_a_tenants_places_and_the_lowest_priority_beyond_its_range(tmp_path):
    tenants = tmp_path / "tenants.toml"
    digest = hashlib.sha256(b"key-a").hexdigest()
    tenants.write_text(f'[tenants.a]\nkeys = ["sha256:{digest}"]\npriority = [-9, 0]\nconcurrent_requests = 2\n')
    batches = BatchConfig(tmp_path / "batches")
    async with (
        scripted_gateway(tenants_file=tenants, batches=batches) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="key-a", max_retries=0) as client,
        httpx.AsyncClient() as admin,
    ):
        batch = await start(client, lines(CHAT, 40, max_tokens=4000, ignore_eos=True))
        await eventually(lambda: gateway.gateway.dispatcher.open_streams > 0)
        for _ in range(5):
            answer = await client.completions.create(model="bytes", prompt="hi", max_tokens=2)
            assert answer.usage is not None
        await client.batches.cancel(batch.id)
        await finished(client, batch.id)
        metrics = (await admin.get(f"{gateway.admin_url}/metrics")).text
        assert 'queue_seconds_count{band="low"}' in metrics
        assert 'refusals_total{reason="priority"}' not in metrics


async def test_a_wrong_parameter_of_a_list_is_refused_by_name(http):
    for query in ("limit=0", "limit=-1", "limit=x", "limit=99999999999", "limit=", "order=up", "x=1"):
        for path in ("/v1/files", "/v1/batches"):
            answer = await http.get(f"{path}?{query}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


async def test_the_same_file_deleted_and_read_at_once_is_found_or_not(client):
    for _ in range(10):
        file = await client.files.create(file=b"x" * 300_000, purpose="batch")
        read, deleted = client.files.content(file.id), client.files.delete(file.id)
        found, _ = await asyncio.gather(read, deleted, return_exceptions=True)
        assert isinstance(found, openai.NotFoundError) or len(found.content) == 300_000


async def test_cancellations_at_once_agree(client):
    batch = await start(client, lines(CHAT, 30, max_tokens=4000, ignore_eos=True))
    answers = await asyncio.gather(*(client.batches.cancel(batch.id) for _ in range(8)))
    assert {answer.status for answer in answers} <= {"cancelling", "cancelled"}
    assert (await finished(client, batch.id)).status == "cancelled"
