"""A prefill and a decode worker in processes of their own, called as a gateway calls them."""

from harness.servers.worker_channel import worker_channel
from kvferry.engine import SamplingParams
from kvferry.rpc.wire import sampling_to_wire
from kvferry.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

CALL_SECONDS = 60.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class Pair:
    """A prefill and a decode worker, called as a gateway calls them."""

    def __init__(self, prefill: str, decode: str, admin: list[str]) -> None:
        self.admin = admin
        self.decode_address = decode
        self._channels = (worker_channel(prefill), worker_channel(decode))
        self.prefill = prefill_pb2_grpc.PrefillStub(self._channels[0])
        self.decode = decode_pb2_grpc.DecodeStub(self._channels[1])

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def run_prefill(self, prompt: list[int], sampling: SamplingParams, **more: object) -> prefill_pb2.PrefillResponse:
        request = prefill_pb2.PrefillRequest(
            request_id="r",
            token_ids=prompt,
            sampling=sampling_to_wire(sampling),
            offer=True,
            **more,  # type: ignore[arg-type]
        )
        return self.prefill.Run(request, timeout=CALL_SECONDS)

    def run_decode(
        self, prompt: list[int], first: int, ticket: bytes, sampling: SamplingParams, **more: object
    ) -> tuple[list[int], decode_pb2.Handoff, int]:
        request = decode_pb2.DecodeRequest(
            request_id="r",
            token_ids=[*prompt, first],
            num_generated=1,
            sampling=sampling_to_wire(sampling),
            ticket=ticket,
            attempt=1,
            **more,  # type: ignore[arg-type]
        )
        tokens: list[int] = []
        handoff, reason = decode_pb2.Handoff(), 0
        for message in self.decode.Run(request, timeout=CALL_SECONDS):
            if message.HasField("handoff"):
                handoff = message.handoff
            tokens += [t.id for t in message.tokens]
            reason = message.finish_reason
        return tokens, handoff, reason

    def generate(self, prompt: list[int], sampling: SamplingParams) -> tuple[list[int], decode_pb2.Handoff]:
        answer = self.run_prefill(prompt, sampling)
        tokens, handoff, reason = self.run_decode(prompt, answer.first_token.id, answer.ticket, sampling)
        ends_by_itself = sampling.constraint is not None
        assert reason == (common_pb2.FINISH_REASON_STOP if ends_by_itself else common_pb2.FINISH_REASON_LENGTH)
        return [answer.first_token.id, *tokens], handoff
