"""schemathesis with /openapi.json against a gateway with API keys and a real worker: no check fails."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from harness.servers.processes import RunningProcess, a_worker
from harness.servers.real_gateway import real_gateway

from kvferry.gateway.admission import key_guesses
from kvferry.gateway.decide.config import BatchConfig, Endpoint, FleetConfig, GatewayConfig, HttpConfig

KEY = "key-of-the-tests"
# A body that the schema accepts may still be refused for a combination of fields: a tool that was not offered, a
# prompt that is too long, top_logprobs without logprobs.
SETTINGS = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", 400, 404, 409, 429]
"""


@pytest.fixture(scope="module")
def worker() -> Iterator[RunningProcess]:
    with a_worker("both") as running:
        yield running


@pytest.fixture
async def url(worker: RunningProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    # The check of wrong keys sends more of them than are allowed per address.
    monkeypatch.setattr("kvferry.gateway.admission.key_guesses.MAX_WRONG_KEYS", 1 << 20)
    assert key_guesses.MAX_WRONG_KEYS == 1 << 20
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY} tests\n")
    listening = worker.events["listening"]
    config = GatewayConfig(
        fleet=FleetConfig(both=(Endpoint(str(listening["grpc"]), str(listening["admin"])),)),
        http=HttpConfig(address="127.0.0.1:0", api_keys_file=keys),
        grpc_address="127.0.0.1:0",
        batches=BatchConfig(tmp_path / "batches", max_file_bytes=1 << 20),
    )
    async with real_gateway(config) as gateway:
        yield f"http://{gateway.listening.http}"


async def found(url: str, folder: Path, *arguments: str) -> str:
    """Run schemathesis; return its report if a check failed, else an empty string."""
    settings = folder / "schemathesis.toml"
    settings.write_text(SETTINGS)
    process = await asyncio.create_subprocess_exec(
        *(Path(sys.executable).with_name("schemathesis"), "--config-file", settings, "run", f"{url}/openapi.json"),
        *("--header", f"Authorization: Bearer {KEY}", "--checks", "all", "--continue-on-failure", "--no-shrink"),
        *("--generation-database", "none", *arguments),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    report = (await process.communicate())[0].decode()
    assert "generated" in report, report
    return "" if process.returncode == 0 else report


async def test_quick(url: str, tmp_path: Path) -> None:
    report = await found(url, tmp_path, "--phases", "examples,fuzzing,stateful", "-n", "6", "--seed", "1")
    assert not report, report


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_long(url: str, tmp_path: Path) -> None:
    report = await found(url, tmp_path, "-n", "300")
    assert not report, report
