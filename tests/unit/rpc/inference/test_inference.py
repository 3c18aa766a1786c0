import asyncio
from typing import Any

import pytest
from harness.fakes.byte_model import BOS, byte_model
from harness.fakes.scripted_tokens import ScriptedSource, expected_tokens, scores_of
from harness.servers.rpc_errors import failure

from kvferry.client.responses import chunk_from_wire
from kvferry.core.errors import InvalidRequest, Unauthenticated, UnknownModel
from kvferry.core.sampling import SamplingParams
from kvferry.rpc.channel import open_channel
from kvferry.rpc.inference.inference import inference_service
from kvferry.rpc.server import start_server
from kvferry.serving.text_service import TextService
from kvferry.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from kvferry.v1.inference_pb2 import Chat, ChatMessage, GenerateRequest


@pytest.fixture
def source() -> ScriptedSource:
    return ScriptedSource()


@pytest.fixture
async def server(source):
    running = await start_server(
        "127.0.0.1:0", [inference_service(TextService(source, byte_model(), new_seed=lambda: 5))]
    )
    yield running
    await running.stop(0)


@pytest.fixture
async def stub(server):
    async with open_channel(server.address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def ask(text: str = "hi", *, max_tokens: int = 8, **fields: Any) -> GenerateRequest:
    return GenerateRequest(text=text, sampling=common_pb2.SamplingParams(max_tokens=max_tokens), **fields)


async def test_generate_streams_text_tokens_and_a_final_message(stub):
    replies = [reply async for reply in stub.Generate(ask(request_id="mine", n=1))]
    expected = expected_tokens([BOS, *b"hi"], SamplingParams(seed=5), 8)
    assert "".join(reply.text for reply in replies).encode() == bytes(expected)
    assert [token.id for reply in replies for token in reply.tokens] == expected
    assert {reply.request_id for reply in replies} == {"mine"}
    last = replies[-1]
    assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert (last.usage.prompt_tokens, last.usage.output_tokens, last.usage.cached_tokens) == (3, 8, 3)
    assert last.timing.total_seconds > 0
    assert not replies[0].HasField("usage")


async def test_samples_carry_their_index(stub):
    replies = [reply async for reply in stub.Generate(ask(n=3))]
    assert sorted(reply.index for reply in replies if reply.HasField("usage")) == [0, 1, 2]


async def test_a_request_id_may_come_as_metadata(stub):
    replies = [reply async for reply in stub.Generate(ask(), metadata=(("x-request-id", "from-header"),))]
    assert replies[0].request_id == "from-header"


async def test_chat_and_tokens_are_prompts_too(stub):
    chat = Chat(messages=[ChatMessage(role="user", content="x")])
    ids = (await stub.Tokenize(inference_pb2.TokenizeRequest(chat=chat))).token_ids
    sampling = common_pb2.SamplingParams(max_tokens=8)
    by_chat = [r.text async for r in stub.Generate(GenerateRequest(chat=chat, sampling=sampling))]
    tokens = common_pb2.TokenIds(ids=ids)
    by_tokens = [r.text async for r in stub.Generate(GenerateRequest(tokens=tokens, sampling=sampling))]
    assert by_chat == by_tokens


async def test_tokenize_and_detokenize_are_inverse(stub):
    ids = (await stub.Tokenize(inference_pb2.TokenizeRequest(text="héllo"))).token_ids
    assert (await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids))).text == "héllo"


async def test_model_info_has_the_limits(stub):
    info = await stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
    assert (info.model, info.max_model_tokens, info.vocab_size, list(info.eos_token_ids)) == ("bytes", 512, 258, [256])


@pytest.mark.parametrize(
    ("request_message", "kind", "field"),
    [
        (GenerateRequest(), InvalidRequest, "prompt"),
        (GenerateRequest(tokens=common_pb2.TokenIds()), InvalidRequest, "prompt"),
        (GenerateRequest(tokens=common_pb2.TokenIds(ids=[258])), InvalidRequest, "prompt"),
        (ask("x" * 512), InvalidRequest, "prompt"),
        (ask(max_tokens=0), InvalidRequest, "max_tokens"),
        (ask(n=65), InvalidRequest, "n"),
        (ask(request_id="two words"), InvalidRequest, "request_id"),
        (ask(model="gpt-4"), UnknownModel, "model"),
        (GenerateRequest(chat=Chat()), InvalidRequest, "messages"),
    ],
)
async def test_bad_requests_are_refused_by_field(stub, source, request_message, kind, field):
    error = await failure(stub.Generate(request_message))
    assert (type(error), error.field) == (kind, field)
    assert source.num_yielded == 0


async def test_unknown_ids_cannot_be_detokenized(stub):
    error = await failure(stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[999])))
    assert error.field == "token_ids"


async def test_cancelling_stops_all_samples(server, stub, source):
    call = stub.Generate(ask(n=2, max_tokens=400))
    await call.read()
    call.cancel()
    await asyncio.wait_for(server.calls.wait_idle(), 5)
    assert source.open_streams == 0


async def test_a_caller_without_a_tenant_is_refused(source):
    def tenant_of(header: str | None, address: str) -> str:
        assert address == "127.0.0.1"
        if header != "Bearer good":
            raise Unauthenticated("no key")
        return "acme"

    service = inference_service(TextService(source, byte_model(), tenant_of=tenant_of))
    running = await start_server("127.0.0.1:0", [service])
    async with open_channel(running.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert isinstance(await failure(stub.Generate(ask())), Unauthenticated)
        good = stub.Generate(ask(), metadata=(("authorization", "Bearer good"),))
        assert [reply async for reply in good]
    await running.stop(0)


@pytest.mark.parametrize(("workers", "served"), [(None, 512), (1024, 512), (176, 176)])
def test_the_limit_of_a_request_is_the_smallest_of_model_and_workers(workers, served):
    service = TextService(ScriptedSource(), byte_model(), context_tokens=lambda: workers)
    assert service.served_tokens == served


async def replies_to(stub: Any, text: str = "hi", **sampling: Any) -> list[Any]:
    request = GenerateRequest(text=text, sampling=common_pb2.SamplingParams(**{"max_tokens": 8, **sampling}))
    return [reply async for reply in stub.Generate(request)]


async def test_log_probabilities_of_the_prompt_are_in_the_first_message(stub):
    first, *others = await replies_to(stub, prompt_logprobs=2)
    expected = scores_of([BOS, *b"hi"], SamplingParams(prompt_logprobs=2))
    chunk = chunk_from_wire(first)
    assert chunk.prompt_logprobs == expected
    assert [chunk_from_wire(other).prompt_logprobs for other in others] == [None] * len(others)
    assert not (await replies_to(stub))[0].prompt_logprobs


async def test_the_stop_string_that_ended_a_text_is_named_and_included_on_request(stub):
    full = "".join(reply.text for reply in await replies_to(stub))
    replies = await replies_to(stub, stop=[full[3:5]])
    assert "".join(reply.text for reply in replies) == full[:3]
    assert replies[-1].stop_string == full[3:5]
    assert chunk_from_wire(replies[-1]).stop_reason == full[3:5]
    assert [reply.WhichOneof("stop_reason") for reply in replies[:-1]] == [None] * (len(replies) - 1)
    replies = await replies_to(stub, stop=[full[3:5]], include_stop_str_in_output=True)
    assert "".join(reply.text for reply in replies) == full[:5]
    (last,) = (await replies_to(stub))[-1:]
    assert last.WhichOneof("stop_reason") is None


async def test_a_prompt_is_truncated_and_bad_words_are_token_ids_before_a_worker_is_called(stub, source):
    requests = []
    stream = source.stream
    source.stream = lambda request: requests.append(request) or stream(request)
    replies = await replies_to(stub, "hello", truncate_prompt_tokens=2, bad_words=["no"])
    assert replies[-1].usage.prompt_tokens == 2
    assert list(requests[0].token_ids) == list(b"lo")
    assert requests[0].sampling.bad_word_token_ids == ((110, 111), (32, 110, 111))
    assert (requests[0].sampling.bad_words, requests[0].sampling.truncate_prompt_tokens) == ((), None)


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"typical_p": 1.5}, "typical_p"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_word_token_ids": [common_pb2.TokenIds(ids=[300])]}, "bad_word_token_ids"),
        ({"bad_word_token_ids": [common_pb2.TokenIds()]}, "bad_word_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
async def test_parameters_have_the_same_bounds_as_over_http(stub, sampling, field):
    request = GenerateRequest(text="hi", sampling=common_pb2.SamplingParams(**sampling))
    error = await failure(stub.Generate(request))
    assert isinstance(error, InvalidRequest)
    assert error.field == field


@pytest.mark.parametrize(
    ("beams", "more", "field"),
    [
        ({"width": 2}, {"stop": ["x"]}, "stop"),
        ({"width": 2}, {"top_p": 0.5}, "top_p"),
        ({"width": 2}, {"temperature": 0.5}, "temperature"),
        ({"width": 2}, {"bad_words": ["x"]}, "bad_words"),
        ({"width": 2}, {"logprobs": 1}, "logprobs"),
        ({"width": 2}, {"min_tokens": 1}, "min_tokens"),
        ({"width": 0}, {}, "beams.width"),
        ({"width": 9}, {}, "beams.width"),
        ({"width": 2, "length_penalty": 11.0}, {}, "beams.length_penalty"),
        ({"width": 2, "stopping": 9}, {}, "beams.stopping"),
    ],
)
async def test_what_a_beam_search_does_not_apply_is_refused_by_name(stub, source, beams, more, field):
    sampling = common_pb2.SamplingParams(max_tokens=4, **more)
    asked = GenerateRequest(text="hi", sampling=sampling, beams=inference_pb2.BeamSearch(**beams))
    error = await failure(stub.Generate(asked))
    assert (type(error), error.field) == (InvalidRequest, field)
    assert source.num_yielded == 0


async def test_outputs_of_a_beam_search_count_their_tokens_and_the_best_one_the_others(stub):
    beams = inference_pb2.BeamSearch(width=4, stopping=inference_pb2.BeamSearch.STOPPING_NEVER)
    sampling = common_pb2.SamplingParams(max_tokens=3, temperature=0.0, seed=3, ignore_eos=True)
    asked = GenerateRequest(text="hi", n=2, beams=beams, sampling=sampling)
    first, second = [reply async for reply in stub.Generate(asked)]
    assert (first.index, second.index) == (0, 1)
    assert [reply.usage.output_tokens for reply in (first, second)] == [3, 3]
    assert [reply.usage.unreturned_tokens for reply in (first, second)] == [4 * 3 - 6, 0]
