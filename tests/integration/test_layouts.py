"""Prefill and decode workers whose pages differ: what can be converted is fetched, what cannot is refused by name."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from kvferry.engine import LLM, SamplingParams
from kvferry.rpc.wire import sampling_to_wire
from kvferry.testing.idle import assert_workers_idle
from kvferry.testing.processes import a_worker
from kvferry.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    kv_transfer_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)

CALL_SECONDS = 60.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
Fetched = decode_pb2.Handoff.OUTCOME_FETCHED


class Pair:
    """A prefill and a decode worker with flags of their own, called as the gateway calls them."""

    def __init__(self, channels: list[grpc.Channel], admin: list[str]) -> None:
        self.admin = admin
        self.prefill = prefill_pb2_grpc.PrefillStub(channels[0])
        self.transfer = kv_transfer_pb2_grpc.KvTransferStub(channels[0])
        self.decode = decode_pb2_grpc.DecodeStub(channels[1])

    def compute(self, prompt: list[int]) -> prefill_pb2.PrefillResponse:
        return self.prefill.Run(
            prefill_pb2.PrefillRequest(request_id="r", token_ids=prompt, sampling=sampling_to_wire(GREEDY), offer=True),
            timeout=CALL_SECONDS,
        )

    def generate(
        self, prompt: list[int], first: int, ticket: bytes = b"", sampling: SamplingParams = GREEDY
    ) -> tuple[list[common_pb2.Token], decode_pb2.Handoff]:
        request = decode_pb2.DecodeRequest(
            request_id="r",
            token_ids=[*prompt, first],
            num_generated=1,
            sampling=sampling_to_wire(sampling),
            ticket=ticket,
            attempt=1,
        )
        messages = list(self.decode.Run(request, timeout=CALL_SECONDS))
        return [token for message in messages for token in message.tokens], messages[0].handoff

    def hand_over(self, prompt: list[int]) -> tuple[list[int], decode_pb2.Handoff]:
        answer = self.compute(prompt)
        tokens, handoff = self.generate(prompt, answer.first_token.id, answer.ticket)
        return [answer.first_token.id, *(token.id for token in tokens)], handoff


@contextmanager
def a_pair(
    connector: str, prefill: list[str], decode: list[str], models: tuple[str, str] = ("tiny", "tiny")
) -> Iterator[Pair]:
    with (
        a_worker("prefill", "--connector", connector, *prefill, model=models[0]) as p,
        a_worker("decode", "--connector", connector, *decode, model=models[1]) as d,
    ):
        heard = [worker.events["listening"] for worker in (p, d)]
        channels = [grpc.insecure_channel(str(h["grpc"])) for h in heard]
        try:
            yield Pair(channels, [str(h["admin"]) for h in heard])
        finally:
            for channel in channels:
                channel.close()


@pytest.fixture(scope="module")
def one_engine() -> LLM:
    return LLM("tiny", dtype="float32", kv_bytes=16 << 20)


@pytest.mark.parametrize("connector", ["shm", "tcp", "nixl"])
@pytest.mark.parametrize(("theirs", "ours"), [(16, 32), (32, 16)])
def test_another_block_size_is_fetched_and_the_tokens_are_one_engines(
    connector: str, theirs: int, ours: int, one_engine: LLM
) -> None:
    with a_pair(connector, ["--block-tokens", str(theirs)], ["--block-tokens", str(ours)]) as pair:
        for length in (1, 15, 16, 17, 33, 47, 48, 100, 290):
            prompt = [(7 * i + length) % 200 for i in range(length)]
            tokens, handoff = pair.hand_over(prompt)
            assert handoff.outcome == Fetched, handoff.reason
            assert handoff.num_blocks == -(-length // ours)
            assert tokens == list(one_engine.generate([prompt], GREEDY)[0].token_ids), length
        again = [(7 * i + 100) % 200 for i in range(100)] + [9] * 20  # the first 96 are cached
        tokens, handoff = pair.hand_over(again)
        assert (handoff.outcome, handoff.num_cached_tokens, handoff.num_blocks) == (Fetched, 96, -(-24 // ours))
        assert tokens == list(one_engine.generate([again], GREEDY)[0].token_ids)
        assert_workers_idle(pair.admin)
