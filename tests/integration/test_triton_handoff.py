"""A hand-off between two engines with the Triton backend, interpreted: the tokens equal those of the torch backend."""

from harness.idle import assert_workers_idle
from harness.servers.processes import a_worker
from harness.servers.worker_channel import worker_channel

from kvferry.engine import LLM, SamplingParams
from kvferry.rpc.wire import sampling_to_wire
from kvferry.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

SECONDS = 120.0


def test_tokens_are_those_of_one_engine_of_torch() -> None:
    one = LLM("tiny", dtype="float32", kernels="torch", kv_memory=16 << 20)
    with a_worker("split", "--connector", "memory", "--kernels", "triton") as worker:
        addresses = worker.events["listening"]
        with (
            worker_channel(str(addresses["grpc"])) as to_prefill,
            worker_channel(str(addresses["decode_grpc"])) as to_decode,
        ):
            prefill, decode = prefill_pb2_grpc.PrefillStub(to_prefill), decode_pb2_grpc.DecodeStub(to_decode)
            for length, temperature in [(1, 0.0), (33, 0.0), (20, 1.0)]:
                sampling = SamplingParams(temperature=temperature, seed=7, max_tokens=6, ignore_eos=True)
                prompt = [(7 * i + length) % 200 for i in range(length)]
                first = prefill.Run(
                    prefill_pb2.PrefillRequest(
                        request_id="r", token_ids=prompt, sampling=sampling_to_wire(sampling), offer=True
                    ),
                    timeout=SECONDS,
                )
                request = decode_pb2.DecodeRequest(
                    request_id="r",
                    token_ids=[*prompt, first.first_token.id],
                    num_generated=1,
                    sampling=sampling_to_wire(sampling),
                    ticket=first.ticket,
                    attempt=1,
                )
                messages = list(decode.Run(request, timeout=SECONDS))
                tokens = [first.first_token.id, *(t.id for m in messages for t in m.tokens)]
                assert tokens == list(one.generate([prompt], sampling)[0].token_ids)
                outcomes = {m.handoff.outcome for m in messages if m.HasField("handoff")}
                assert outcomes == {decode_pb2.Handoff.OUTCOME_FETCHED}
        assert_workers_idle([str(addresses["admin"]), str(addresses["decode_admin"])])
        assert worker.stop() == 0
