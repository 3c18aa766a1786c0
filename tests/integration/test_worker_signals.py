"""SIGTERM to a real worker in each of its states, and its answers to callers during the drain."""

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.servers.processes import RunningProcess, a_worker, running
from harness.servers.worker_channel import worker_channel
from harness.waiting import until

from kvferry.engine import SamplingParams
from kvferry.rpc.errors import error_from_rpc
from kvferry.rpc.wire import sampling_to_wire
from kvferry.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_admin_pb2_grpc
from kvferry.v1.worker_admin_pb2 import DrainRequest, StatusRequest

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
SECONDS = 30.0
POD_IP = "127.0.0.2"
"""An address that no process listens on by default."""
PROMPT = [(11 * i) % 200 for i in range(40)]


class Asked:
    """A worker and stubs for its two ports."""

    def __init__(self, worker: RunningProcess) -> None:
        self.worker = worker
        self.work = worker_channel(str(worker.events["listening"]["grpc"]))
        # A caller needs an address; the worker may listen on the wildcard.
        admin = str(worker.events["listening"]["admin"]).replace("0.0.0.0:", "127.0.0.1:")
        self.admin = worker_channel(admin)
        self.decode = decode_pb2_grpc.DecodeStub(self.work)
        self.prefill = prefill_pb2_grpc.PrefillStub(self.work)
        self.operate = worker_admin_pb2_grpc.WorkerAdminStub(self.admin)

    def health(self, channel: grpc.Channel, service: str = "") -> int:
        asked = health_pb2.HealthCheckRequest(service=service)
        return int(health_pb2_grpc.HealthStub(channel).Check(asked, timeout=SECONDS).status)

    def stream(self, tokens: int) -> Iterator[decode_pb2.DecodeResponse]:
        """Return a stream that has begun."""
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        request = decode_pb2.DecodeRequest(request_id="r", token_ids=PROMPT, sampling=sampling_to_wire(params))
        call = self.decode.Run(request, timeout=60)
        next(call)
        return call

    def offer(self) -> prefill_pb2.PrefillResponse:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        return self.prefill.Run(
            prefill_pb2.PrefillRequest(request_id="r", token_ids=PROMPT, sampling=sampling_to_wire(params), offer=True),
            timeout=SECONDS,
        )

    def terminate(self) -> None:
        self.worker.process.send_signal(signal.SIGTERM)


@contextmanager
def asked(role: str, *flags: str) -> Iterator[Asked]:
    with a_worker(role, *flags) as worker:
        made = Asked(worker)
        try:
            yield made
        finally:
            made.work.close()
            made.admin.close()


def test_a_draining_worker_is_not_ready_but_alive_and_ends_with_its_stream() -> None:
    with asked("decode", "--drain-seconds", "60") as it:
        assert it.health(it.work) == it.health(it.work, "kvferry.v1.Decode") == SERVING
        call = it.stream(400)
        it.terminate()
        until(lambda: it.health(it.work) == NOT_SERVING, "not ready")
        assert it.health(it.work, "kvferry.v1.Decode") == NOT_SERVING
        assert it.health(it.admin) == it.health(it.admin, "liveness") == SERVING
        assert it.operate.Status(StatusRequest(), timeout=SECONDS).draining
        with pytest.raises(grpc.RpcError) as refused:
            it.stream(1)
        error = error_from_rpc(refused.value)
        assert (error.grpc_status, error.reason) == ("UNAVAILABLE", "DRAINING")
        rest = list(call)
        assert rest[-1].finish_reason, "the running stream was not cut"
        assert it.worker.process.wait(SECONDS) == 0


def test_a_stream_that_exceeds_the_grace_period_ends_as_retryable() -> None:
    with asked("decode", "--drain-seconds", "0.2") as it:
        call = it.stream(8000)
        it.terminate()
        with pytest.raises(grpc.RpcError) as cut:
            list(call)
        error = error_from_rpc(cut.value)
        assert (error.grpc_status, error.reason) == ("UNAVAILABLE", "DRAINING")
        assert it.worker.process.wait(SECONDS) == 0


def test_a_second_signal_ends_the_drain() -> None:
    with asked("decode", "--drain-seconds", "600") as it:
        calls = [it.stream(8000) for _ in range(30)]  # several seconds of work
        it.terminate()
        until(lambda: it.health(it.work) == NOT_SERVING, "not ready")

        def has_ended_after_a_signal() -> bool:
            if it.worker.process.poll() is None:
                it.terminate()
            return it.worker.process.poll() is not None

        until(has_ended_after_a_signal, "ended")  # signals right after the first one have no effect
        with pytest.raises(grpc.RpcError):
            list(chain(*calls))
        assert it.worker.process.wait(SECONDS) in (0, -signal.SIGTERM)  # a signal may come after the drain


def test_an_offer_is_kept_until_it_expires() -> None:
    with asked("prefill", "--drain-seconds", "60", "--offer-seconds", "2") as it:
        assert it.offer().ticket_id
        it.terminate()
        until(lambda: it.health(it.work) == NOT_SERVING, "not ready")
        assert it.operate.Status(StatusRequest(), timeout=SECONDS).load.tickets_offered == 1
        assert it.worker.process.poll() is None
        assert it.worker.process.wait(SECONDS) == 0


@pytest.mark.parametrize("connector", ["shm", "tcp", "nixl"])
def test_an_offer_is_still_read_while_its_worker_drains(connector: str) -> None:
    everywhere = ("--listen", "0.0.0.0:0", "--admin", "0.0.0.0:0", "--advertise-host", POD_IP)
    flags = ("--connector", connector, "--drain-seconds", "60", *everywhere)
    with asked("prefill", "--offer-seconds", "30", *flags) as p, asked("decode", *flags) as d:
        answer = p.offer()
        p.terminate()
        until(lambda: p.health(p.work) == NOT_SERVING, "not ready")
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        request = decode_pb2.DecodeRequest(
            request_id="r",
            token_ids=[*PROMPT, answer.first_token.id],
            num_generated=1,
            sampling=sampling_to_wire(params),
            ticket=answer.ticket,
            attempt=1,
        )
        first = next(d.decode.Run(request, timeout=SECONDS))
        assert first.handoff.outcome == decode_pb2.Handoff.OUTCOME_FETCHED
        assert p.worker.process.wait(10) == 0, "the worker exits when the offer was read, before its expiry"


def test_draining_by_a_call_makes_the_worker_not_ready_too() -> None:
    with asked("decode") as it:
        assert it.operate.Drain(DrainRequest(timeout_seconds=1), timeout=SECONDS).idle
        assert it.health(it.work) == NOT_SERVING
        assert it.health(it.admin, "liveness") == SERVING
        assert it.worker.stop() == 0


@pytest.mark.parametrize("model", ["tiny", "smollm2-135m-instruct"])
@pytest.mark.parametrize("after_seconds", [0.3, 1.5, 3.0])
def test_a_signal_during_the_start_ends_the_worker_at_once(model: str, after_seconds: float) -> None:
    with running("worker", "--role", "both", "--model", model, "--kv-memory", "64MiB", "--threads", "1") as worker:
        with suppress(subprocess.TimeoutExpired):
            worker.process.wait(after_seconds)
        begun = time.monotonic()
        assert worker.stop() in ((0, -signal.SIGTERM) if after_seconds < 1 else (0,))
        assert time.monotonic() - begun < 2.0


def test_a_worker_listens_on_all_addresses_and_advertises_the_configured_one() -> None:
    flags = ("--advertise-host", POD_IP, "--worker-id", "pod-0", "--metrics", "0.0.0.0:0")
    with asked("prefill", "--listen", "0.0.0.0:0", "--admin", "0.0.0.0:0", *flags) as it:
        addresses = it.worker.events["listening"]
        assert str(addresses["grpc"]).startswith(f"{POD_IP}:")
        status = it.operate.Status(StatusRequest(), timeout=SECONDS)
        assert status.identity.worker_id == "pod-0"
        it.offer()
        page = httpx.get(f"http://{addresses['metrics']}/metrics", timeout=SECONDS).text
        lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        assert lines['kvferry_worker_tickets_offered{worker="pod-0"}'] == "1.0"
        assert float(lines['kvferry_worker_exported_blocks{worker="pod-0"}']) >= 2
        assert lines['vllm:num_requests_waiting{model_name="tiny"}'] == "0.0"
        assert lines['vllm:num_requests_running{model_name="tiny"}'] == "0.0"
        assert 0 < float(lines['vllm:kv_cache_usage_perc{model_name="tiny"}']) < 1
        blocks = status.load.blocks_total
        info = f'vllm:cache_config_info{{block_size="16",model_name="tiny",num_gpu_blocks="{blocks}"}}'
        assert lines[info] == "1.0"
        begun = time.perf_counter()
        for _ in range(20):
            httpx.get(f"http://{addresses['metrics']}/metrics", timeout=SECONDS)
        assert (time.perf_counter() - begun) / 20 < 0.2


def test_a_metrics_port_in_use_is_reported() -> None:
    with asked("decode", "--metrics", "127.0.0.1:0") as it:
        taken = str(it.worker.events["listening"]["metrics"])
        flags = ("--role", "decode", "--model", "tiny", "--kv-memory", "16MiB", "--connector", "shm")
        with running("worker", *flags, "--metrics", taken) as second:
            assert second.process.wait(60) == 2


def test_a_worker_without_a_reachable_address_is_refused() -> None:
    with running("worker", "--role", "decode", "--model", "tiny", "--listen", "0.0.0.0:0") as worker:
        assert worker.process.wait(60) == 2
