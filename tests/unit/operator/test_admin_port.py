"""The admin ports of a pool's gateways: the token of changes, and who may connect."""

from pathlib import Path
from typing import Any

import pytest
from unit.operator.pools import made_of, pool

from kvferry.core.settings.processes import GATEWAY
from kvferry.gateway.http.admin_access import MIN_TOKEN_CHARS, read_tokens
from kvferry.operator.objects.keys import KEY_ENTRIES, key_secret_data

CHART = Path(__file__).resolve().parents[3] / "charts/kvferry/templates/_helpers.tpl"


def gateway(**spec: Any) -> dict[str, Any]:
    return dict(made_of(pool(**spec))["Deployment/chat-gateway"]["spec"]["template"]["spec"])


def policy(**spec: Any) -> dict[str, Any]:
    return dict(made_of(pool(**spec))["NetworkPolicy/chat-gateways"]["spec"])


@pytest.mark.parametrize(
    ("spec", "secret"), [({}, "chat-keys"), ({"internalKeys": {"secretName": "mine"}}, "mine")], ids=["made", "given"]
)
def test_gateways_mount_the_token_of_the_pools_secret(spec: dict[str, Any], secret: str) -> None:
    made = gateway(**spec)
    (container,) = made["containers"]
    (file,) = [arg.partition("=")[2] for arg in container["args"] if arg.startswith("--admin-token-file=")]
    (volume,) = [volume for volume in made["volumes"] if volume["name"] == "admin-token"]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "admin-token"]
    assert volume["secret"] == {
        "secretName": secret,
        "items": [{"key": "admin-token", "path": "admin-token"}],
        "optional": True,  # pods start without it, as with the Secret of an earlier release
    }
    assert mount == {"name": "admin-token", "mountPath": file.rpartition("/")[0], "readOnly": True}
    assert file.endswith("/admin-token")
    assert "admin_token_file" in {setting.name for setting in GATEWAY}
    (keys,) = [volume for volume in made["volumes"] if volume["name"] == "keys"]
    assert not keys["secret"].get("optional"), "the other keys are needed"
    assert "ticket-key" not in {item["key"] for item in keys["secret"]["items"]}


def test_the_secret_has_a_token_that_the_gateway_accepts(tmp_path: Path) -> None:
    data = key_secret_data("t" * 64, "b" * 64, "a" * 64)
    assert tuple(data) == KEY_ENTRIES
    assert data["admin-token"] == "a" * 64
    file = tmp_path / "admin-token"
    file.write_text(data["admin-token"])
    (token,) = read_tokens(file)
    assert len(token.value) == 64 >= MIN_TOKEN_CHARS


@pytest.mark.parametrize("processes", [1, 3])
def test_clients_ports_are_open_and_admin_ports_are_for_the_operator_and_monitoring(processes: int) -> None:
    made = policy(gateway={"processes": processes})
    assert made["podSelector"]["matchLabels"] == {"kvferry.dev/pool": "chat", "kvferry.dev/role": "gateway"}
    assert made["policyTypes"] == ["Ingress"]
    clients, admin = made["ingress"]
    assert clients == {"ports": [{"port": port, "protocol": "TCP"} for port in (8000, 9000)]}
    assert [one["port"] for one in admin["ports"]] == [8001 + number for number in range(processes)]
    assert all(one["namespaceSelector"] == {} for one in admin["from"]), "the operator has a namespace of its own"
    assert [one["podSelector"]["matchLabels"] for one in admin["from"]] == [
        {"app.kubernetes.io/name": "kvferry-operator"},
        {"app.kubernetes.io/name": "prometheus"},
        {"kvferry.dev/admin-access": "true"},
    ]
    ports = gateway(gateway={"processes": processes})["containers"][0]["ports"]
    assert {one["containerPort"] for one in ports} == {one["port"] for rule in made["ingress"] for one in rule["ports"]}


def test_the_operator_of_the_chart_is_admitted() -> None:
    assert "app.kubernetes.io/name: kvferry-operator\n" in CHART.read_text("utf-8")


def test_without_a_policy_there_is_none() -> None:
    assert not [name for name in made_of(pool(networkPolicy="Off")) if name.startswith("NetworkPolicy")]
