"""Prefill and decode workers with different page layouts: convertible pages are fetched, others are refused by name."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import grpc
import pytest
from harness.idle import assert_workers_idle
from harness.kernels.family_checkpoints import CHECKPOINTS, WINDOW
from harness.servers.processes import a_worker
from harness.servers.worker_channel import worker_channel
from safetensors.numpy import save_file

from kvferry.engine import LLM, SamplingParams
from kvferry.kv.pages.layout import KvLayout
from kvferry.model import tiny
from kvferry.rpc.wire import sampling_to_wire
from kvferry.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    kv_transfer_pb2,
    kv_transfer_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_admin_pb2,
    worker_admin_pb2_grpc,
)
from kvferry.workers.handoff.peer_layouts import layout_to_wire

CALL_SECONDS = 60.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
Fetched = decode_pb2.Handoff.OUTCOME_FETCHED


class Pair:
    """A prefill and a decode worker, each with its own flags, called as a gateway calls them."""

    def __init__(self, channels: list[grpc.Channel], admin: list[str]) -> None:
        self.admin = admin
        self.worker_admin = worker_admin_pb2_grpc.WorkerAdminStub(channels[2])
        self.prefill = prefill_pb2_grpc.PrefillStub(channels[0])
        self.transfer = kv_transfer_pb2_grpc.KvTransferStub(channels[0])
        self.decode = decode_pb2_grpc.DecodeStub(channels[1])

    def compute(self, prompt: list[int]) -> prefill_pb2.PrefillResponse:
        return self.prefill.Run(
            prefill_pb2.PrefillRequest(request_id="r", token_ids=prompt, sampling=sampling_to_wire(GREEDY), offer=True),
            timeout=CALL_SECONDS,
        )

    def generate(
        self, prompt: list[int], first: int, ticket: bytes = b"", sampling: SamplingParams = GREEDY, tenant: str = ""
    ) -> tuple[list[common_pb2.Token], decode_pb2.Handoff]:
        request = decode_pb2.DecodeRequest(
            request_id="r",
            token_ids=[*prompt, first],
            num_generated=1,
            sampling=sampling_to_wire(sampling),
            ticket=ticket,
            attempt=1,
            scope=tenant,
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
        announced = [worker.events["listening"] for worker in (p, d)]
        addresses = [*(str(h["grpc"]) for h in announced), str(announced[0]["admin"])]
        channels = [worker_channel(address) for address in addresses]
        try:
            yield Pair(channels, [str(h["admin"]) for h in announced])
        finally:
            for channel in channels:
                channel.close()


@pytest.fixture(scope="module")
def one_engine() -> Callable[[str], LLM]:
    """A function from the type of KV to an engine."""
    return cache(lambda dtype: LLM("tiny", dtype=dtype, kv_memory=16 << 20))


@pytest.mark.parametrize("connector", ["shm", "tcp", "nixl"])
@pytest.mark.parametrize(
    ("theirs", "ours", "dtype"), [(16, 32, "float32"), (32, 16, "float32"), (16, 16, "int8"), (32, 16, "fp8")]
)
def test_another_block_size_is_fetched_and_the_tokens_are_one_engines(
    connector: str, theirs: int, ours: int, dtype: str, one_engine: Callable[[str], LLM]
) -> None:
    with a_pair(connector, *(["--dtype", dtype, "--block-tokens", str(size)] for size in (theirs, ours))) as pair:
        for length in (1, 15, 16, 17, 33, 47, 48, 100, 290):
            prompt = [(7 * i + length) % 200 for i in range(length)]
            tokens, handoff = pair.hand_over(prompt)
            assert handoff.outcome == Fetched, handoff.reason
            assert handoff.num_blocks == -(-length // ours)
            assert tokens == list(one_engine(dtype).generate([prompt], GREEDY)[0].token_ids), length
        again = [(7 * i + 100) % 200 for i in range(100)] + [9] * 20  # the first 96 tokens are cached
        tokens, handoff = pair.hand_over(again)
        assert (handoff.outcome, handoff.num_cached_tokens, handoff.num_blocks) == (Fetched, 96, -(-24 // ours))
        assert tokens == list(one_engine(dtype).generate([again], GREEDY)[0].token_ids)
        assert_workers_idle(pair.admin)


NEAR_TIE = 0.1
"""Nats. Tokens may differ only where the log-probabilities of the two best tokens differ by less.

The reader computes the same text twice in its own data type: over the converted KV of the other worker, and over its
own KV. Rounding changes a key or a value by up to 2^-9 of its magnitude; for the tokens below, this changes a
log-probability by up to 0.04 (measured)."""


@pytest.mark.parametrize(
    ("connector", "theirs", "ours"),
    [
        ("shm", ("float32", 16), ("bfloat16", 32)),
        ("nixl", ("bfloat16", 32), ("float32", 16)),
        ("tcp", ("float32", 16), ("float16", 16)),
        ("shm", ("bfloat16", 16), ("int8", 32)),
        ("tcp", ("int8", 16), ("bfloat16", 16)),
        ("shm", ("bfloat16", 16), ("fp8", 16)),
    ],
)
def test_another_element_type_is_fetched_and_the_tokens_are_the_readers_own_but_for_near_ties(
    connector: str, theirs: tuple[str, int], ours: tuple[str, int]
) -> None:
    flags = [["--dtype", dtype, "--block-tokens", str(size)] for dtype, size in (theirs, ours)]
    scored = replace(GREEDY, logprobs=2)
    with a_pair(connector, *flags) as pair:
        for length in (1, 17, 33, 100):
            prompt = [(11 * i + length) % 200 for i in range(length)]
            answer = pair.compute(prompt)
            fetched, handoff = pair.generate(prompt, answer.first_token.id, answer.ticket, scored)
            assert handoff.outcome == Fetched, handoff.reason
            # Another tenant shares no blocks, so the decode worker computes the whole prompt.
            computed, own = pair.generate(prompt, answer.first_token.id, sampling=scored, tenant="another")
            assert (own.outcome, own.num_cached_tokens) == (decode_pb2.Handoff.OUTCOME_NONE, 0)
            assert_equal_but_for_a_near_tie(fetched, computed)
        assert_workers_idle(pair.admin)


def assert_equal_but_for_a_near_tie(ones: list[common_pb2.Token], others: list[common_pb2.Token]) -> None:
    for one, other in zip(ones, others, strict=True):
        if one.id != other.id:  # from here on the texts differ
            best, second = (t.logprob for t in other.top)
            assert one.id in {t.token_id for t in other.top}
            assert best - second < NEAR_TIE
            return
        assert abs(one.logprob - other.logprob) < NEAR_TIE


@pytest.fixture
def other_model(tmp_path: Path) -> str:
    """A folder with a model of three layers."""
    config = replace(tiny.config(), num_layers=3)
    folder = tmp_path / "three"
    folder.mkdir()
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_model_tokens,
        "eos_token_id": 258,
        "bos_token_id": 257,
    }
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "tokenizer.json").write_text(tiny.tokenizer(config)._make().to_str())
    source = tiny.TinyTensors(config)
    save_file({name: source.read(name) for name in source.shapes()}, folder / "model.safetensors")
    return str(folder)


def test_a_pair_of_different_models_is_refused_by_name(other_model: str) -> None:
    with a_pair("shm", [], ["--block-tokens", "32"], ("tiny", other_model)) as pair:
        prompt = [5] * 20
        answer = pair.compute(prompt)
        with pytest.raises(grpc.RpcError) as caught:
            pair.generate(prompt, answer.first_token.id, answer.ticket)
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "KV layouts differ in model_digest" in str(caught.value.details())
        pair.prefill.Release(prefill_pb2.ReleaseRequest(ticket_id=answer.ticket_id), timeout=CALL_SECONDS)
        assert_workers_idle(pair.admin)

        status = pair.worker_admin.Status(worker_admin_pb2.StatusRequest(), timeout=CALL_SECONDS)
        own = KvLayout(status.model_digest, "float32", 2, 2, 16, 16)
        assert (own.fingerprint, own.family) == (status.fingerprint, status.family)
        refusals = {}
        for name, reader in {
            "equal": own,
            "block_tokens": replace(own, block_tokens=24, dtype="float16"),
            "fewer heads": replace(own, num_kv_heads=1, first_kv_head=1, total_kv_heads=2),
            "num_layers": replace(own, num_layers=3),
            "head_dim": replace(own, head_dim=8),
            "model_digest": replace(own, model_digest="else"),
        }.items():
            request = kv_transfer_pb2.DescribeRequest(
                incarnation=status.identity.incarnation,
                connector="shm",
                fingerprint=reader.fingerprint,
                layout=layout_to_wire(reader),
            )
            try:
                answered = pair.transfer.Describe(request, timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                refusals[name] = str(error.details())
            else:
                assert answered.layout == layout_to_wire(own)
        assert sorted(refusals) == ["head_dim", "model_digest", "num_layers"]
        assert all(f"KV layouts differ in {name}" in why for name, why in refusals.items())
        request.fingerprint = b"?" * 16
        with pytest.raises(grpc.RpcError) as caught:
            pair.transfer.Describe(request, timeout=CALL_SECONDS)
        assert "its description does not match its fingerprint" in str(caught.value.details())
        request.ClearField("layout")
        with pytest.raises(grpc.RpcError) as caught:
            pair.transfer.Describe(request, timeout=CALL_SECONDS)
        assert "sent no description of it" in str(caught.value.details())


def test_a_model_with_sliding_windows_is_handed_over(tmp_path: Path) -> None:
    """Prompts are several times longer than the window, so layers with a window no longer need most of their KV."""
    folder = tmp_path / "gemma"
    CHECKPOINTS["gemma3"].write(folder)
    one = LLM(str(folder), dtype="float32", kv_memory=8 << 20)
    with a_pair("shm", *(["--dtype", "float32"],) * 2, models=(str(folder),) * 2) as pair:
        for length in (5 * WINDOW, 290):
            prompt = [(7 * i + length) % 200 for i in range(length)]
            tokens, handoff = pair.hand_over(prompt)
            assert handoff.outcome == Fetched, handoff.reason
            assert tokens == list(one.generate([prompt], GREEDY)[0].token_ids)
        assert_workers_idle(pair.admin)


def test_workers_with_other_rotary_frequencies_refuse_each_other(tmp_path: Path) -> None:
    folder = tmp_path / "phi"
    CHECKPOINTS["phi3"].write(folder)
    short = ["--dtype", "float32", "--max-model-len", "64"]
    with a_pair("shm", short, ["--dtype", "float32"], (str(folder),) * 2) as pair:
        prompt = [5] * 20
        answer = pair.compute(prompt)
        with pytest.raises(grpc.RpcError, match="KV layouts differ in model_digest"):
            pair.generate(prompt, answer.first_token.id, answer.ticket)
        pair.prefill.Release(prefill_pb2.ReleaseRequest(ticket_id=answer.ticket_id), timeout=CALL_SECONDS)
        assert_workers_idle(pair.admin)
