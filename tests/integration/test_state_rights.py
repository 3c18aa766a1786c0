"""The rights that the documentation gives a Redis user suffice for a gateway, and reach no other keys."""

import re
from pathlib import Path

import httpx
import pytest
from harness.fakes.scripted_gateway import scripted_gateway
from harness.servers.redis_server import redis_server
from harness.waiting import eventually

from kvferry.gateway.decide.config import StateConfig

PAGE = Path(__file__).parents[2] / "docs" / "resuming.md"


def rule() -> str:
    """Return the rule of the page, without the command's name."""
    (found,) = re.findall(r"`ACL SETUSER NAME (on [^`]*)`", PAGE.read_text("utf-8"))
    return str(" ".join(found.split()))


async def test_a_user_with_the_documented_rights_suffices(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text("[default]\nrequests_per_minute = 600\n")
    with redis_server(acl=["default off", f"gateway {rule().replace('>PASSWORD', '>secret')}"]) as server:
        state = StateConfig(f"redis://gateway:secret@127.0.0.1:{server.port}/0")
        async with (
            scripted_gateway(state=state, tenant_key=b"k" * 32, tenants_file=tenants) as gateway,
            httpx.AsyncClient(base_url=f"{gateway.url}/v1", timeout=30) as http,
        ):
            body = {"input": "hi", "max_output_tokens": 8}
            stored = (await http.post("/responses", json=body)).json()
            assert stored["store"] is True
            more = await http.post("/responses", json={**body, "previous_response_id": stored["id"], "store": True})
            assert more.status_code == 200
            begun = (await http.post("/responses", json={**body, "background": True})).json()["id"]
            assert (await http.post(f"/responses/{begun}/cancel")).status_code == 200
            for name in (begun, stored["id"]):
                assert (await http.delete(f"/responses/{name}")).status_code == 200
            stream = await http.post("/completions", json={"prompt": "hi", "max_tokens": 8, "stream": True})
            assert "id: " in stream.text
            calls = gateway.gateway.instruments.state_calls
            for part in ("responses", "streams", "quotas"):
                await eventually(lambda part=part: calls.labels(part, "ok")._value.get() > 0)  # type: ignore[misc]
                for outcome in ("unreachable", "slow", "full", "read_only", "error"):
                    assert not calls.labels(part, outcome)._value.get(), (part, outcome)
        with pytest.raises(Exception, match="NOPERM"):
            server.ask(b"EVAL", b"return redis.call('HGET', KEYS[1], 'x')", b"1", b"other", user=("gateway", "secret"))
