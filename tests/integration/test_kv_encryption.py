"""Encrypted KV between real worker processes: what a recording of the wire contains, and workers of both modes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import psutil
import pytest
from harness.idle import assert_workers_idle
from harness.servers.processes import RunningProcess, a_worker, running
from harness.servers.tcp_relay import Edit, TcpRelay, as_they_are, cut, flip, tcp_relay
from harness.servers.worker_pair import GREEDY, Pair
from harness.waiting import until

from kvferry.client import Client
from kvferry.engine import LLM
from kvferry.v1 import decode_pb2

SECONDS = 60.0
PROMPT = [(7 * i) % 200 for i in range(120)]
PROMPTS = [[1 + (7 * i + j) % 200 for j in range(60 + i)] for i in range(4)]
TCP = ("--connector", "tcp")
ENCRYPTED = (*TCP, "--kv-encryption", "true")
PIECE = 32
FIRST_PAGE = 192 + 256 + 128
"""Offset of the first page in the encrypted bytes of an owner: behind the handshake, the epochs with which a reader
tests the connection, and the head of the reply."""


@pytest.fixture(scope="module")
def one_engine() -> LLM:
    return LLM("tiny", dtype="float32", kv_memory=16 << 20)


def ports(worker: RunningProcess) -> set[int]:
    connections = psutil.Process(worker.process.pid).net_connections("tcp")
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


def port_of(address: object) -> int:
    return int(str(address).rpartition(":")[2])


@contextmanager
def a_relayed_pair(*flags: str, to_client: Edit = as_they_are) -> Iterator[tuple[Pair, TcpRelay]]:
    """Yield a pair whose decode worker reaches the prefill worker over relays, and that of the page server's port.

    The prefill worker listens on 127.0.0.1 and is advertised as 127.0.0.2, where the relays are.
    """
    with (
        ExitStack() as stack,
        a_worker("prefill", *flags, "--listen", "127.0.0.1:0", "--advertise-host", "127.0.0.2") as prefill,
        a_worker("decode", *flags) as decode,
    ):
        listening, near = prefill.events["listening"], decode.events["listening"]
        grpc_port, admin_port = port_of(listening["grpc"]), port_of(listening["admin"])
        (page_port,) = ports(prefill) - {grpc_port, admin_port}
        relays = [
            stack.enter_context(tcp_relay(("127.0.0.1", port), host="127.0.0.2", port=port, to_client=edit))
            for port, edit in ((grpc_port, as_they_are), (page_port, to_client))
        ]
        admin = [f"127.0.0.1:{admin_port}", str(near["admin"])]
        pair = Pair(f"127.0.0.1:{grpc_port}", str(near["grpc"]), admin)
        stack.callback(pair.close)
        yield pair, relays[1]
        assert_workers_idle(admin)


def pieces_of(recorded: bytes) -> set[bytes]:
    """Return parts of a recording that are unlikely by chance: those with many different bytes."""
    found = {recorded[i : i + PIECE] for i in range(0, len(recorded) - PIECE, PIECE)}
    return {piece for piece in found if len(set(piece)) > PIECE // 2}


def recording(one_engine: LLM, *flags: str) -> bytes:
    """Return what the page server of a prefill worker sent for a hand-off, whose tokens are checked."""
    with a_relayed_pair(*flags) as (pair, relay):
        tokens, handoff = pair.generate(PROMPT, GREEDY)
        assert handoff.outcome == decode_pb2.Handoff.OUTCOME_FETCHED, handoff.reason
        assert handoff.num_bytes <= sum(map(len, relay.to_client))
        assert tokens == list(one_engine.generate([PROMPT], GREEDY)[0].token_ids)
        return b"".join(relay.to_client)


def test_a_recording_of_a_hand_off_has_its_kv_exactly_without_encryption(one_engine: LLM) -> None:
    """The KV of a prompt is the same in each run, so that the pieces of one recording are looked for in others."""
    pieces = pieces_of(recording(one_engine, *TCP))
    assert len(pieces) > 100
    again = recording(one_engine, *TCP)
    assert sum(piece in again for piece in pieces) > 0.9 * len(pieces), "without encryption the KV is visible"
    encrypted = recording(one_engine, *ENCRYPTED)
    assert not [piece for piece in pieces if piece in encrypted]


@pytest.mark.parametrize(
    ("edit", "says"), [(flip(FIRST_PAGE + 1000), "altered"), (cut(FIRST_PAGE + 1000), "closed the connection")]
)
def test_kv_that_was_changed_on_its_way_is_computed(one_engine: LLM, edit: Edit, says: str) -> None:
    with a_relayed_pair(*ENCRYPTED, to_client=edit) as (pair, _):
        tokens, handoff = pair.generate(PROMPT, GREEDY)
        assert tokens == list(one_engine.generate([PROMPT], GREEDY)[0].token_ids)
        assert handoff.outcome == decode_pb2.Handoff.OUTCOME_FAILED
        assert says in handoff.reason


def test_kv_that_was_changed_on_its_way_is_used_without_encryption() -> None:
    """The same change, so that the test above can fail; what the tokens are then is not defined."""
    with a_relayed_pair(*TCP, to_client=flip(FIRST_PAGE + 1000)) as (pair, _):
        assert pair.generate(PROMPT, GREEDY)[1].outcome == decode_pb2.Handoff.OUTCOME_FETCHED


@pytest.mark.parametrize(
    ("of_prefill", "of_decode", "says"),
    [(TCP, ENCRYPTED, "does not encrypt KV"), (ENCRYPTED, TCP, "requires encrypted KV")],
    ids=["plain to encrypted", "encrypted to plain"],
)
def test_workers_of_two_modes_compute_and_name_the_cause(
    one_engine: LLM, of_prefill: tuple[str, ...], of_decode: tuple[str, ...], says: str
) -> None:
    with a_worker("prefill", *of_prefill) as prefill, a_worker("decode", *of_decode) as decode:
        listening = [worker.events["listening"] for worker in (prefill, decode)]
        pair = Pair(str(listening[0]["grpc"]), str(listening[1]["grpc"]), [str(each["admin"]) for each in listening])
        try:
            tokens, handoff = pair.generate(PROMPT, GREEDY)
        finally:
            pair.close()
        assert tokens == list(one_engine.generate([PROMPT], GREEDY)[0].token_ids)
        assert handoff.outcome == decode_pb2.Handoff.OUTCOME_FAILED
        assert says in handoff.reason
        assert_workers_idle(pair.admin)


def test_a_rolling_change_of_the_mode_loses_no_request(one_engine: LLM) -> None:
    """The gateway pairs workers of equal modes; an encrypting worker without such a peer computes prompts itself."""

    def endpoint(worker: RunningProcess) -> str:
        listening = worker.events["listening"]
        return f"{listening['grpc']}/{port_of(listening['admin'])}"

    expected = [list(result.token_ids) for result in one_engine.generate(PROMPTS, GREEDY)]
    with (
        a_worker("prefill", *TCP) as prefill,
        a_worker("decode", *TCP) as plain,
        a_worker("decode", *ENCRYPTED) as encrypted,
        running(
            *("gateway", "--model", "tiny", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"),
            *("--prefill", endpoint(prefill), "--decode", endpoint(plain), "--decode", endpoint(encrypted)),
        ) as gateway,
    ):
        bound = gateway.wait_for("listening")
        until(lambda: httpx.get(f"http://{bound['http']}/ready").status_code == 200, "the gateway is ready")

        def answers() -> list[list[int]]:
            with Client(str(bound["grpc"]), timeout=SECONDS) as client:
                return [list(client.complete(prompt, GREEDY)[0].token_ids) for prompt in PROMPTS]

        def handoffs(outcome: str) -> float:
            page = httpx.get(f"http://{bound['admin']}/metrics").text
            name = f'kvferry_gateway_handoffs_total{{outcome="{outcome}"}}'
            return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))

        assert answers() == expected
        assert handoffs("fetched") > 0
        assert plain.stop() == 0
        assert answers() == expected
        assert handoffs("failed") == 0
        assert_workers_idle([str(worker.events["listening"]["admin"]) for worker in (prefill, encrypted)])
