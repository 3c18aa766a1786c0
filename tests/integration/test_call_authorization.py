"""Authorization on the ports of running workers: each method, for callers without a key and in each role."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import grpc
import pytest
from harness.idle import assert_workers_idle
from harness.servers.processes import RunningProcess, a_worker
from harness.servers.worker_channel import TEST_KEYS, signer_of, worker_channel

from kvferry.core.hashing import BlockNamers
from kvferry.kv.interface.seals import BlocksSeal
from kvferry.kv.interface.ticket import Keyring
from kvferry.rpc.access.call_keys import CallSigner, role_key
from kvferry.rpc.access.table import ALLOWED, CallerRole
from kvferry.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    inference_pb2,
    kv_events_pb2,
    kv_transfer_pb2,
    kv_transfer_pb2_grpc,
    prefill_pb2,
    worker_admin_pb2,
    worker_admin_pb2_grpc,
)

SECONDS = 20.0
OPEN_TO_ROLE = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
WORKER = common_pb2.WorkerIdentity(worker_id="w", incarnation="1" * 16)


def requests(dialed: str) -> dict[str, Any]:
    """Return a plausible request for each method; `dialed` is an address that no worker may dial."""
    return {
        "/kvferry.v1.Prefill/Run": prefill_pb2.PrefillRequest(request_id="r", token_ids=[1, 2, 3], offer=True),
        "/kvferry.v1.Prefill/Pool": prefill_pb2.PoolRequest(request_id="r", token_ids=[1, 2, 3]),
        "/kvferry.v1.Prefill/Release": prefill_pb2.ReleaseRequest(ticket_id="0" * 32),
        "/kvferry.v1.Decode/Run": decode_pb2.DecodeRequest(request_id="r", token_ids=[1, 2, 3]),
        "/kvferry.v1.Decode/PrefetchKv": decode_pb2.PrefetchKvRequest(
            request_id="r", token_ids=[5] * 100, ticket_id="0" * 32, prefill=WORKER, prefill_address=dialed
        ),
        "/kvferry.v1.Inference/Generate": inference_pb2.GenerateRequest(text="Hello"),
        "/kvferry.v1.Inference/Embed": inference_pb2.EmbedRequest(
            inputs=[inference_pb2.EmbedRequest.Input(text="Hello")]
        ),
        "/kvferry.v1.Inference/Tokenize": inference_pb2.TokenizeRequest(text="Hello"),
        "/kvferry.v1.Inference/Detokenize": inference_pb2.DetokenizeRequest(token_ids=[1]),
        "/kvferry.v1.Inference/GetModelInfo": inference_pb2.GetModelInfoRequest(),
        "/kvferry.v1.KvTransfer/Describe": kv_transfer_pb2.DescribeRequest(reader=WORKER, connector="tcp"),
        "/kvferry.v1.KvTransfer/Claim": kv_transfer_pb2.ClaimRequest(ticket_id="0" * 32, reader=WORKER),
        "/kvferry.v1.KvTransfer/Renew": kv_transfer_pb2.RenewRequest(ticket_id="0" * 32),
        "/kvferry.v1.KvTransfer/Finish": kv_transfer_pb2.FinishRequest(ticket_id="0" * 32),
        "/kvferry.v1.KvTransfer/WatchBlocks": kv_transfer_pb2.WatchBlocksRequest(ticket_id="0" * 32),
        "/kvferry.v1.KvEvents/Subscribe": kv_events_pb2.SubscribeRequest(),
        "/kvferry.v1.KvEvents/Probe": kv_events_pb2.ProbeRequest(),
        "/kvferry.v1.WorkerAdmin/Status": worker_admin_pb2.StatusRequest(),
        "/kvferry.v1.WorkerAdmin/ResetPrefixCache": worker_admin_pb2.ResetPrefixCacheRequest(),
        "/kvferry.v1.WorkerAdmin/PinPrefix": worker_admin_pb2.PinPrefixRequest(token_ids=[6] * 16, ttl_seconds=0.001),
        "/kvferry.v1.WorkerAdmin/UnpinPrefix": worker_admin_pb2.UnpinPrefixRequest(token_ids=[6] * 16),
        "/kvferry.v1.WorkerAdmin/LoadAdapter": worker_admin_pb2.LoadAdapterRequest(name="a", path="a"),
        "/kvferry.v1.WorkerAdmin/UnloadAdapter": worker_admin_pb2.UnloadAdapterRequest(name="a"),
        "/kvferry.v1.WorkerAdmin/Profile": worker_admin_pb2.ProfileRequest(steps=1, timeout_seconds=0.1),
        "/kvferry.v1.WorkerAdmin/SetPause": worker_admin_pb2.SetPauseRequest(revision=1),  # resumes
        "/kvferry.v1.WorkerAdmin/PrepareWeights": worker_admin_pb2.PrepareWeightsRequest(revision=1, path="a"),
        "/kvferry.v1.WorkerAdmin/CommitWeights": worker_admin_pb2.CommitWeightsRequest(revision=1),
        "/kvferry.v1.WorkerAdmin/DiscardWeights": worker_admin_pb2.DiscardWeightsRequest(revision=1),
        "/kvferry.v1.WorkerAdmin/Drain": worker_admin_pb2.DrainRequest(timeout_seconds=0.1),
    }


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProcess]:
    # Without the folders, calls that load adapters or weights are refused with the same status as calls without
    # permission.
    adapters, weights = (str(tmp_path_factory.mktemp(name)) for name in ("adapters", "weights"))
    folders = ("--adapter-folder", adapters, "--adapter-slots", "1", "--weights-folder", weights)
    with a_worker("both", "--connector", "tcp", "--log-level", "error", *folders) as process:
        yield process


def port_of(worker: RunningProcess, method: str) -> str:
    return str(worker.events["listening"]["admin" if "WorkerAdmin" in method else "grpc"])


def answer(address: str, method: str, metadata: tuple[tuple[str, str], ...]) -> grpc.StatusCode:
    """Call `method` with a plausible message and return the status, or OK if a stream begins."""
    request = requests("127.0.0.1:9")[method]
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_stream(method, request_serializer=type(request).SerializeToString)
        try:
            messages = call(request, timeout=SECONDS, metadata=metadata)
            next(iter(messages), None)
            messages.cancel()
        except grpc.RpcError as error:
            code = error.code()
            assert isinstance(code, grpc.StatusCode)
            return code
    return grpc.StatusCode.OK


@pytest.mark.parametrize("method", sorted(ALLOWED))
def test_a_call_without_a_key_is_unauthenticated(worker: RunningProcess, method: str) -> None:
    address = port_of(worker, method)
    foreign = CallSigner(CallerRole.GATEWAY, role_key(b"another pool's secret", CallerRole.GATEWAY))
    elsewhere = signer_of(CallerRole.GATEWAY).metadata(method, "127.0.0.1:9")
    other_method = signer_of(CallerRole.GATEWAY).metadata("/kvferry.v1.Prefill/Other", address)
    for metadata in ((), (("kvferry-caller", "x"),), foreign.metadata(method, address), elsewhere, other_method):
        assert answer(address, method, metadata) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("role", CallerRole)
def test_a_role_may_call_the_methods_of_the_table(worker: RunningProcess, role: CallerRole) -> None:
    for method in ALLOWED:
        if method.endswith("/Drain") and role in ALLOWED[method]:
            continue  # a draining worker would refuse all later calls; `test_worker_signals` drains one
        address = port_of(worker, method)
        code = answer(address, method, signer_of(role).metadata(method, address))
        if role in ALLOWED[method]:
            assert code not in OPEN_TO_ROLE, method
        else:
            assert code is grpc.StatusCode.PERMISSION_DENIED, method
    assert_workers_idle([str(worker.events["listening"]["admin"])])


def test_a_status_is_proved_to_its_caller(worker: RunningProcess) -> None:
    address = str(worker.events["listening"]["admin"])
    method = "/kvferry.v1.WorkerAdmin/Status"
    gateway = signer_of(CallerRole.GATEWAY)
    with grpc.insecure_channel(address) as channel:
        stub = worker_admin_pb2_grpc.WorkerAdminStub(channel)
        metadata = gateway.metadata(method, address)
        status = stub.Status(worker_admin_pb2.StatusRequest(nonce=b"n" * 16), timeout=SECONDS, metadata=metadata)
        port = str(worker.events["listening"]["grpc"]).rpartition(":")[2].encode()
        assert gateway.proves(status.proof, address, b"n" * 16 + port)
        assert not gateway.proves(status.proof, address, b"n" * 16 + b"1")
        with pytest.raises(grpc.RpcError) as caught:
            stub.Status(worker_admin_pb2.StatusRequest(nonce=b"n" * 65), timeout=SECONDS, metadata=metadata)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


class LyingPeer(kv_transfer_pb2_grpc.KvTransferServicer):
    """A peer that pairs the genuine names of a prompt's blocks with pages of its choice."""

    def __init__(self, names: list[bytes], keyring: Keyring | None, number: int = 0) -> None:
        self.names, self.keyring, self.number = names, keyring, number
        self.described = 0

    def WatchBlocks(self, request: kv_transfer_pb2.WatchBlocksRequest, context: Any) -> Iterator[Any]:
        ids, epochs = tuple(range(len(self.names))), (1,) * len(self.names)
        sealed = BlocksSeal(request.ticket_id, request.incarnation, self.number, ids, epochs, tuple(self.names), ())
        yield kv_transfer_pb2.WatchBlocksResponse(
            block_ids=ids,
            epochs=epochs,
            names=self.names,
            seal=b"" if self.keyring is None else self.keyring.sign(sealed),
        )

    def Describe(self, request: kv_transfer_pb2.DescribeRequest, context: Any) -> Any:
        self.described += 1
        return kv_transfer_pb2.DescribeResponse(identity=WORKER, fingerprint=request.fingerprint, address=b"x")


@pytest.mark.parametrize("address", ["ipv4:127.0.0.1:9", "unix:/tmp/x", "dns://127.0.0.1/x:9", "127.0.0.1", "", ":9"])
def test_only_a_host_and_a_port_are_dialed(worker: RunningProcess, address: str) -> None:
    method = "/kvferry.v1.Decode/PrefetchKv"
    with worker_channel(str(worker.events["listening"]["grpc"])) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            decode_pb2_grpc.DecodeStub(channel).PrefetchKv(requests(address)[method], timeout=SECONDS)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


@contextmanager
def serving(peer: LyingPeer) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    kv_transfer_pb2_grpc.add_KvTransferServicer_to_server(peer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait(SECONDS)


@pytest.mark.parametrize(
    ("keyring", "number", "is_believed"),
    [
        (None, 0, False),
        (Keyring([b"another pool's secret"]), 0, False),
        (Keyring([TEST_KEYS["KVFERRY_TICKET_KEY"].encode()]), 1, False),  # sealed for another position in the stream
        (Keyring([TEST_KEYS["KVFERRY_TICKET_KEY"].encode()]), 0, True),
    ],
)
def test_blocks_that_no_worker_of_the_pool_sealed_are_not_fetched(
    worker: RunningProcess, keyring: Keyring | None, number: int, is_believed: bool
) -> None:
    status_channel = worker_channel(str(worker.events["listening"]["admin"]))
    with ExitStack() as stack, suppress(StopIteration):
        stack.enter_context(status_channel)
        status = worker_admin_pb2_grpc.WorkerAdminStub(status_channel).Status(
            worker_admin_pb2.StatusRequest(), timeout=SECONDS
        )
        tokens = [7 + number] * 100
        namers = BlockNamers(TEST_KEYS["KVFERRY_TENANT_KEY"].encode())
        namer = namers.of("", fingerprint=status.fingerprint, block_tokens=status.block_tokens)
        peer = LyingPeer(list(namer.chain(tokens[:-1])), keyring, number)
        address = stack.enter_context(serving(peer))
        channel = stack.enter_context(worker_channel(str(worker.events["listening"]["grpc"])))
        request = decode_pb2.PrefetchKvRequest(
            request_id="r", token_ids=tokens, ticket_id="0" * 32, prefill=WORKER, prefill_address=address
        )
        assert decode_pb2_grpc.DecodeStub(channel).PrefetchKv(request, timeout=SECONDS).num_blocks == 0
        # After a valid seal the worker calls Describe; the fake's answer has no seal, so no block is fetched.
        assert bool(peer.described) is is_believed
    assert_workers_idle([str(worker.events["listening"]["admin"])])
