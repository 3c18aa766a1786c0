"""Processes of a stack: counts, flags, addresses, and configurations that are refused before a start."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import UsageError
from kvferry.stack.plan.processes import (
    MAX_WORKERS,
    ProcessSpec,
    StackConfig,
    compute_threads,
    gateway_spec,
    worker_specs,
)

KEYS = {"KVFERRY_TICKET_KEY": "t" * 32}


def event(port: int) -> dict[str, object]:
    return {
        "grpc": f"127.0.0.1:{port}",
        "admin": f"127.0.0.1:{port + 1}",
        "decode_grpc": f"127.0.0.1:{port + 2}",
        "decode_admin": f"127.0.0.1:{port + 3}",
    }


def endpoints(spec: ProcessSpec) -> list[tuple[str, str]]:
    """Return role and address of each worker in the gateway's flags."""
    flags = [(a, b) for a, b in zip(spec.arguments, spec.arguments[1:], strict=False)]
    return [(a.removeprefix("--"), b) for a, b in flags if a in {"--prefill", "--decode", "--both"}]


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.sampled_from(["shm", "nixl", "memory"]))
def test_every_worker_is_started_once_and_is_in_the_gateways_flags(
    prefill: int, decode: int, both: int, connector: str
) -> None:
    try:
        config = StackConfig("tiny", prefill, decode, both, connector, gateway_flags=("--drain-seconds", "1"))
    except UsageError:
        assert (not both and not (prefill and decode)) or (connector == "memory" and prefill != decode)
        return
    specs = worker_specs(config, KEYS)
    assert len({s.name for s in specs}) == len(specs)
    assert all(s.environment.items() >= KEYS.items() for s in specs)
    gateway = gateway_spec(config, [(s, event(1000 + 10 * i)) for i, s in enumerate(specs)], KEYS)
    listed = endpoints(gateway)
    assert sorted(role for role, _ in listed) == ["both"] * both + ["decode"] * decode + ["prefill"] * prefill
    assert len({address for _, address in listed}) == len(listed)
    assert gateway.arguments[-2:] == ("--drain-seconds", "1")


def test_separate_processes_get_model_connector_and_the_users_flags() -> None:
    config = StackConfig("tiny", connector="nixl", worker_flags=("--dtype", "float32"))
    prefill, decode = worker_specs(config, KEYS)
    for spec, role in ((prefill, "prefill"), (decode, "decode")):
        assert spec.name == f"{role}-0"
        assert spec.arguments[:7] == ("worker", "--role", role, "--model", "tiny", "--connector", "nixl")
        assert spec.arguments[-2:] == ("--dtype", "float32")
        assert "{grpc}" in spec.arguments, "the supervisor inserts the address that the first start bound"


def test_the_gateway_is_given_each_workers_services_and_the_port_of_its_admin() -> None:
    config = StackConfig("tiny", both=1, connector="memory")
    split, both = worker_specs(config, KEYS)
    assert (split.arguments[2], both.arguments[2]) == ("split", "both")
    assert endpoints(gateway_spec(config, [(split, event(1000)), (both, event(2000))], KEYS)) == [
        ("prefill", "127.0.0.1:1000/1001"),
        ("decode", "127.0.0.1:1002/1003"),
        ("both", "127.0.0.1:2000/2001"),
    ]


@pytest.mark.parametrize(
    ("config", "role", "threads"),
    [
        (StackConfig("tiny", cores=2), "prefill", 2),
        (StackConfig("tiny", cores=2), "decode", 1),
        (StackConfig("tiny", decode=2, cores=12), "decode", 4),
        (StackConfig("tiny", prefill=0, decode=0, both=1, cores=8), "both", 8),
        (StackConfig("tiny", cores=2, connector="memory"), "split", 2),
        (StackConfig("tiny", cores=2, threads=5), "decode", 5),
    ],
)
def test_cores_are_shared_by_role_unless_threads_are_set(config: StackConfig, role: str, threads: int) -> None:
    assert compute_threads(config, role) == threads


def test_only_a_worker_that_is_alone_spins_for_long() -> None:
    (alone,) = worker_specs(StackConfig("tiny", prefill=0, decode=0, both=1), KEYS)
    shared, _ = worker_specs(StackConfig("tiny"), KEYS)
    assert int(alone.environment["GOMP_SPINCOUNT"]) > int(shared.environment["GOMP_SPINCOUNT"])


@pytest.mark.parametrize("name", ["prefill", "decode", "both"])
@pytest.mark.parametrize("count", [-1, MAX_WORKERS + 1])
def test_counts_out_of_bounds_are_refused_by_name(name: str, count: int) -> None:
    with pytest.raises(UsageError, match=f"--{name} must be between 0 and {MAX_WORKERS}, not {count}") as caught:
        StackConfig("tiny", **{name: count})  # type: ignore[arg-type]
    assert caught.value.field == name


def test_a_stack_that_could_serve_no_request_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot serve requests"):
        StackConfig("tiny", prefill=2, decode=0)
    assert worker_specs(StackConfig("tiny", prefill=0, decode=0, both=1), KEYS)[0].name == "both-0"
