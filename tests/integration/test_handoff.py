"""A prompt through real worker processes: prefill, hand-off, decode; the tokens are those of one engine."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import pytest
from harness.idle import assert_workers_idle
from harness.kernels.head_files import write_eagle, write_medusa
from harness.servers.processes import RunningProcess, a_worker, connector_flags
from harness.servers.worker_channel import TEST_KEYS, worker_channel
from harness.servers.worker_pair import CALL_SECONDS, GREEDY, Pair

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.engine import LLM, SamplingParams
from kvferry.kv.interface.ticket import Keyring
from kvferry.model import tiny
from kvferry.rpc.wire import sampling_to_wire, scores_from_wire
from kvferry.v1 import (
    decode_pb2,
    kv_events_pb2,
    kv_events_pb2_grpc,
    prefill_pb2,
)

DRAWN = SamplingParams(temperature=1.0, top_p=0.9, seed=77, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def one_engine() -> LLM:
    return LLM("tiny", dtype="float32", kv_memory=16 << 20)


def drafts_of(page: str) -> float:
    """Return the number of verified drafts from a metrics page."""
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("kvferry_worker_drafts_total{"))


@contextmanager
def a_pair(connector: str, speculation: str = "off") -> Iterator[tuple[Pair, list[RunningProcess]]]:
    if connector == "memory":
        with a_worker("split", "--connector", "memory") as worker:
            addresses = worker.events["listening"]
            admin = [str(addresses["admin"]), str(addresses["decode_admin"])]
            pair = Pair(str(addresses["grpc"]), str(addresses["decode_grpc"]), admin)
            try:
                yield pair, [worker]
            finally:
                pair.close()
        return
    flags = (*connector_flags(connector), "--speculation", speculation, "--metrics", "127.0.0.1:0")
    with a_worker("prefill", *flags) as p, a_worker("decode", *flags) as d:
        addresses = [w.events["listening"] for w in (p, d)]
        pair = Pair(str(addresses[0]["grpc"]), str(addresses[1]["grpc"]), [str(h["admin"]) for h in addresses])
        try:
            yield pair, [p, d]
        finally:
            pair.close()


SPECULATION = {
    "memory": "auto",
    "shm": "draft=tiny?k=4&fixed=1",
    "nixl": "suffix?k=8",
    "tcp": "ngram?k=4&min=1",
    "tcp-encrypted": "off",
}
"""Speculation of the workers by connector. Drafts change no token."""


@pytest.fixture(scope="module", params=SPECULATION)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    method = SPECULATION[request.param]
    with a_pair(request.param, method) as (made, workers):
        yield made
        assert_workers_idle(made.admin)
        if method not in ("off", "auto"):
            pages = [httpx.get(f"http://{w.events['listening']['metrics']}/metrics").text for w in workers]
            assert [drafts_of(page) > 0 for page in pages] == [False, True], "only decode workers speculate"
        for worker in workers:
            assert worker.stop() == 0, "a worker exits with status 0 after SIGTERM"


@pytest.mark.parametrize(
    ("connector", "method"),
    [
        ("shm", "eagle3"),
        *(
            pytest.param(connector, method, marks=pytest.mark.long)
            for connector in ("shm", "tcp", "nixl")
            for method in ("eagle", "eagle3", "medusa")
            if (connector, method) != ("shm", "eagle3")
        ),
    ],
)
def test_heads_change_no_token(connector: str, method: str, one_engine: LLM, tmp_path: Path) -> None:
    # The decode worker has no hidden states of the prompt, so a head starts at the first token.
    model = tiny.config()
    if method == "medusa":
        write_medusa(tmp_path, model)
    else:
        write_eagle(tmp_path, model, is_fused=method == "eagle3")
    speculation = f"{method.removesuffix('3')}={tmp_path}?k=4&fixed=1"
    with a_pair(connector, speculation) as (pair, (_, decode)):
        for index, sampling in enumerate((GREEDY, DRAWN)):
            long = replace(sampling, max_tokens=40)
            prompt = [(7 * i + index) % 200 for i in range(90)]
            tokens, handoff = pair.generate(prompt, long)
            assert tokens == list(one_engine.generate([prompt], long)[0].token_ids)
            assert handoff.outcome == decode_pb2.Handoff.OUTCOME_FETCHED
        page = httpx.get(f"http://{decode.events['listening']['metrics']}/metrics").text
        assert drafts_of(page) > 0
        assert_workers_idle(pair.admin)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_constraint_holds_on_both_workers(pair: Pair, one_engine: LLM, sampling: SamplingParams) -> None:
    # The decode worker restores the grammar's state from the token that the prefill worker sampled.
    constraint = Constraint(ConstraintKind.REGEX, "([0-9]{3}-){4}[a-f]{4}")
    constrained = replace(sampling, constraint=constraint, max_tokens=64)
    prompt = list(range(40))
    tokens, handoff = pair.generate(prompt, constrained)
    assert tokens == list(one_engine.generate([prompt], constrained)[0].token_ids)
    assert re.fullmatch(rb"(\d{3}-){4}[a-f]{4}", bytes(tokens[:-1])), "the last token ends the sequence"
    assert handoff.outcome == decode_pb2.Handoff.OUTCOME_FETCHED


def test_every_sampling_parameter_holds_on_both_workers(pair: Pair, one_engine: LLM) -> None:
    sampling = replace(
        DRAWN,
        typical_p=0.8,
        allowed_token_ids=tuple(range(200)),
        bad_word_token_ids=((7,), (90, 91)),
        presence_penalty=0.5,
        min_tokens=4,
        logprobs=2,
        prompt_logprobs=3,
    )
    prompt = [(11 * i) % 190 for i in range(70)]
    answer = pair.run_prefill(prompt, sampling)
    (expected,) = one_engine.generate([prompt], sampling)
    first = answer.first_token.id
    rest, handoff, _ = pair.run_decode(prompt, first, answer.ticket, replace(sampling, prompt_logprobs=None))
    assert (first, *rest) == expected.token_ids
    assert handoff.outcome == decode_pb2.Handoff.OUTCOME_FETCHED
    scores, wanted = scores_from_wire(answer.prompt_logprobs), expected.prompt_logprobs
    assert wanted is not None
    assert [(s.token_id, s.rank, [t for t, _ in s.top]) for s in scores] == [
        (s.token_id, s.rank, [t for t, _ in s.top]) for s in wanted
    ]
    assert [s.logprob for s in scores] == pytest.approx([s.logprob for s in wanted], abs=1e-5)  # float32 in messages
    again = pair.run_prefill(prompt, sampling)
    assert scores_from_wire(again.prompt_logprobs) == scores, "scored rows of cached blocks are computed again"
    pair.prefill.Release(prefill_pb2.ReleaseRequest(ticket_id=again.ticket_id, reason="test"), timeout=CALL_SECONDS)
    assert_workers_idle(pair.admin)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 100])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_tokens_are_those_of_one_engine(pair: Pair, one_engine: LLM, length: int, sampling: SamplingParams) -> None:
    prompt = [(7 * i + length) % 200 for i in range(length)]
    tokens, handoff = pair.generate(prompt, sampling)
    assert tokens == list(one_engine.generate([prompt], sampling)[0].token_ids)
    assert handoff.outcome in {decode_pb2.Handoff.OUTCOME_FETCHED, decode_pb2.Handoff.OUTCOME_LOCAL}
    assert_workers_idle(pair.admin)


def test_only_missing_blocks_are_transferred(pair: Pair) -> None:
    prompt = [3] * 40
    _, first = pair.generate(prompt, GREEDY)
    _, second = pair.generate(prompt, GREEDY)
    assert (first.outcome, first.num_blocks) == (decode_pb2.Handoff.OUTCOME_FETCHED, 3)
    assert (second.outcome, second.num_blocks, second.num_cached_tokens) == (decode_pb2.Handoff.OUTCOME_FETCHED, 1, 32)
    _, third = pair.generate([3] * 32, GREEDY)
    assert third.outcome == decode_pb2.Handoff.OUTCOME_LOCAL
    assert_workers_idle(pair.admin)


def test_a_ticket_for_other_tokens_is_refused_by_name(pair: Pair) -> None:
    prompt = [5] * 20
    answer = pair.run_prefill(prompt, GREEDY)
    for tokens, ticket in [
        ([6] * 20, answer.ticket),
        (prompt, answer.ticket[:-1] + bytes([answer.ticket[-1] ^ 1])),
        (prompt, b"junk"),
    ]:
        with pytest.raises(grpc.RpcError) as caught:
            pair.run_decode(tokens, 1, ticket, GREEDY)
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    pair.prefill.Release(prefill_pb2.ReleaseRequest(ticket_id=answer.ticket_id), timeout=CALL_SECONDS)
    pair.prefill.Release(prefill_pb2.ReleaseRequest(ticket_id=answer.ticket_id), timeout=CALL_SECONDS)
    assert_workers_idle(pair.admin)


def test_a_released_offer_is_computed_instead(pair: Pair, one_engine: LLM) -> None:
    prompt = [9, 8, 7] * 9
    answer = pair.run_prefill(prompt, GREEDY)
    pair.prefill.Release(prefill_pb2.ReleaseRequest(ticket_id=answer.ticket_id), timeout=CALL_SECONDS)
    tokens, handoff, _ = pair.run_decode(prompt, answer.first_token.id, answer.ticket, GREEDY)
    assert [answer.first_token.id, *tokens] == list(one_engine.generate([prompt], GREEDY)[0].token_ids)
    assert handoff.outcome == decode_pb2.Handoff.OUTCOME_FAILED
    assert "TICKET_GONE" in handoff.reason
    assert_workers_idle(pair.admin)


def test_a_ticket_serves_once(pair: Pair, one_engine: LLM) -> None:
    prompt = [(3 * i) % 190 for i in range(37)]
    answer = pair.run_prefill(prompt, GREEDY)
    expected = list(one_engine.generate([prompt], GREEDY)[0].token_ids)[1:]
    tokens, handoff, _ = pair.run_decode(prompt, answer.first_token.id, answer.ticket, GREEDY)
    assert (tokens, handoff.outcome) == (expected, decode_pb2.Handoff.OUTCOME_FETCHED)
    tokens, handoff, _ = pair.run_decode(prompt, answer.first_token.id, answer.ticket, GREEDY)
    assert tokens == expected
    assert (handoff.outcome, handoff.num_blocks) == (decode_pb2.Handoff.OUTCOME_FAILED, 0)
    assert "TICKET_GONE" in handoff.reason
    assert_workers_idle(pair.admin)


def test_a_ticket_sealed_with_another_key_is_refused(pair: Pair) -> None:
    answer = pair.run_prefill([4] * 18, GREEDY)
    ticket = Keyring([TEST_KEYS["KVFERRY_TICKET_KEY"].encode()]).open(answer.ticket)
    with pytest.raises(grpc.RpcError) as caught:
        pair.run_decode([4] * 18, answer.first_token.id, Keyring([b"x" * 32]).seal(ticket), GREEDY)
    assert "same ticket key" in str(caught.value.details())
    pair.prefill.Release(prefill_pb2.ReleaseRequest(ticket_id=answer.ticket_id), timeout=CALL_SECONDS)
    assert_workers_idle(pair.admin)


def test_a_cancelled_stream_releases_all_resources(pair: Pair) -> None:
    answer = pair.run_prefill([2] * 50, GREEDY)
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    call = pair.decode.Run(
        decode_pb2.DecodeRequest(
            request_id="r",
            token_ids=[*[2] * 50, answer.first_token.id],
            num_generated=1,
            sampling=sampling_to_wire(long),
            ticket=answer.ticket,
            attempt=1,
        ),
        timeout=CALL_SECONDS,
    )
    next(iter(call))
    call.cancel()
    assert_workers_idle(pair.admin)


def test_a_prefill_whose_caller_leaves_releases_all_resources(pair: Pair) -> None:
    request = prefill_pb2.PrefillRequest(
        request_id="r", token_ids=[1] * 300, sampling=sampling_to_wire(GREEDY), offer=True
    )
    for _ in range(5):
        pair.prefill.Run.future(request, timeout=CALL_SECONDS).cancel()
    assert_workers_idle(pair.admin)


@pytest.mark.parametrize("connector", ["shm", "nixl", "tcp", "tcp-encrypted"])
def test_a_prefill_worker_killed_before_the_read_costs_only_time(connector: str, one_engine: LLM) -> None:
    prompt = [(11 * i) % 200 for i in range(40)]
    with a_pair(connector) as (pair, (killed, _)):
        pair.generate([1] * 17, GREEDY)  # connects the two workers
        answer = pair.run_prefill(prompt, GREEDY)
        killed.process.kill()
        killed.process.wait(30)
        tokens, handoff, _ = pair.run_decode(prompt, answer.first_token.id, answer.ticket, GREEDY)
        assert [answer.first_token.id, *tokens] == list(one_engine.generate([prompt], GREEDY)[0].token_ids)
        assert handoff.outcome == decode_pb2.Handoff.OUTCOME_FAILED
        assert_workers_idle(pair.admin[1:])


def names_of(joined: bytes) -> set[bytes]:
    return {joined[start : start + 32] for start in range(0, len(joined), 32)}


def test_a_subscriber_gets_every_cached_block(pair: Pair) -> None:
    with worker_channel(pair.decode_address) as channel:
        stream = kv_events_pb2_grpc.KvEventsStub(channel).Subscribe(kv_events_pb2.SubscribeRequest())
        snapshot = next(stream)
        names = names_of(snapshot.snapshot.blocks.names)
        pair.generate([77, 78] * 20, GREEDY)
        delta = next(stream)
        assert delta.sequence == snapshot.sequence + 1
        fresh = names_of(delta.delta.stored.names)
        assert len(fresh) >= 2
        assert delta.digest.count == len((names - names_of(delta.delta.removed)) | fresh)
        stream.cancel()
    assert_workers_idle(pair.admin)
