"""Each process of a gateway has the group's settings, a share of its limits, and its own admin port."""

import pytest

from kvferry.core.errors import UsageError
from kvferry.core.settings.processes import GATEWAY
from kvferry.core.settings.resolve import resolve
from kvferry.stack.plan.gateway_processes import SharedAddresses, admin_address, gateway_process_specs

SHARED = SharedAddresses("0.0.0.0:8000", "0.0.0.0:9000")


def test_processes_have_the_settings_of_the_group() -> None:
    flags = {
        "both": ["a:1/2", "b:3/4"],
        "processes": "3",
        "http": "0.0.0.0:8000",
        "admin": "0.0.0.0:7000",
        "max_streams": "100",
        "policy": "random",
        "served_name": "{x}",
        "trace_file": "/logs/{day}",
    }
    environment = {"KVFERRY_GATEWAY_KEY": "secret of the gateway", "KVFERRY_MAX_QUEUED_BYTES": "3MiB"}
    found = resolve(GATEWAY, flags, environment, {"linger_seconds": 2.5})
    specs = gateway_process_specs(found, SHARED, 3)
    assert [spec.name for spec in specs] == ["gateway-0", "gateway-1", "gateway-2"]
    for number, spec in enumerate(specs):
        arguments = [argument.format_map({"admin": "here:1"}) for argument in spec.arguments]
        assert arguments[0] == "gateway"
        given = resolve(GATEWAY, flags_of(arguments[1:]), spec.environment, {})
        assert {name: given[name].value for name in ("both", "policy", "served_name", "linger_seconds")} == {
            "both": ["a:1/2", "b:3/4"],
            "policy": "random",
            "served_name": "{x}",
            "linger_seconds": 2.5,
        }
        assert (given["http"].value, given["grpc"].value, given["admin"].value) == (*vars_of(SHARED), "here:1")
        assert (given["processes"].value, given["share_ports"].value) == (1, True)
        assert (given["max_streams"].value, given["max_queued_bytes"].value) == (34, 1 << 20)
        assert given["max_queued"].value == -(-found["max_queued"].value // 3)
        assert given["gateway_key"].value == "secret of the gateway"
        assert "secret of the gateway" not in arguments
        assert given["request_timeout"].source == "default"
        assert given["trace_file"].value == f"/logs/{{day}}.{number}"
        assert given["trace_file_bytes"].value == -(-found["trace_file_bytes"].value // 3)


def vars_of(shared: SharedAddresses) -> tuple[str, str]:
    return shared.http, shared.grpc


def flags_of(arguments: list[str]) -> dict[str, object]:
    known = {setting.flag: setting for setting in GATEWAY}
    found: dict[str, object] = {}
    for flag, value in zip(arguments[::2], arguments[1::2], strict=True):
        setting = known[flag]
        found[setting.name] = [*found.get(setting.name, []), value] if setting.is_repeated else value
    return found


def test_admin_ports_follow_each_other_or_are_free_ones() -> None:
    assert [admin_address("127.0.0.1:7000", number) for number in range(3)] == [
        "127.0.0.1:7000",
        "127.0.0.1:7001",
        "127.0.0.1:7002",
    ]
    assert admin_address("[::1]:0", 5) == "[::1]:0"
    for wrong, number in (("nowhere", 0), ("h:65535", 1), ("h:99999", 0)):
        with pytest.raises(UsageError, match="admin"):
            admin_address(wrong, number)
