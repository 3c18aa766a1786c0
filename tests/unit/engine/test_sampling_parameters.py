"""Each sampling parameter has an effect on real tokens, alone and in any batch.

`EFFECTS` has one check for each field of `SamplingParams`, which fails if the field is ignored; a field without a check
fails the comparison with the fields of the gRPC message and of the HTTP requests.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.core.ids import RequestId
from kvferry.core.sampling import FinishReason, SamplingParams
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine import LLM
from kvferry.engine.offline.llm import Completion
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.gateway.http.fields.cache_fields import CacheHintFields
from kvferry.gateway.http.fields.request_fields import ConstraintFields
from kvferry.gateway.http.openai.schema import ChatRequest, CompletionRequest
from kvferry.v1 import common_pb2

PROMPT = [*b"a tale of two cities"]
EOS = (256, 258)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(seed=5, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", dtype="float32", kv_memory=16 << 20)


def one(llm: LLM, base: SamplingParams = GREEDY, prompt: Sequence[int] = PROMPT, **changes: Any) -> Completion:
    (made,) = llm.generate([prompt], replace(base, **changes))
    return made


def first_tokens(llm: LLM, count: int = 400, **changes: Any) -> Counter[int]:
    """Sample the token after the prompt with `count` seeds."""
    found: Counter[int] = Counter()
    for seed in range(count):
        found[one(llm, DRAWN, seed=seed, **{"max_tokens": 1, **changes}).token_ids[0]] += 1
    return found


def distribution(llm: LLM, temperature: float = 1.0, prompt: Sequence[int] = PROMPT) -> np.ndarray[Any, Any]:
    """Return the model's next-token distribution at a temperature, without any other parameter."""
    shares = np.zeros(259)
    for token in range(259):
        # A bias of 100 selects the token; log-probabilities are of the unmodified logits.
        made = one(llm, prompt=prompt, max_tokens=1, logit_bias={token: 100.0}, logprobs=0)
        assert made.token_ids[0] == token
        assert made.logprobs[0].logprob is not None
        shares[token] = np.exp(made.logprobs[0].logprob)
    assert shares.sum() == pytest.approx(1.0)
    shares **= 1 / temperature
    return shares / shares.sum()


def check_frequencies(found: Counter[int], expected: np.ndarray[Any, Any]) -> None:
    """Check draws by chi-square; tokens with an expected count below five form one class."""
    count, expected = sum(found.values()), expected / expected.sum()
    assert all(expected[token] > 0 for token in found), "a token of probability 0 was drawn"
    large = [token for token in np.argsort(-expected) if expected[token] * count >= 5]
    classes = [(found[token], expected[token] * count) for token in large]
    rest = (count - sum(seen for seen, _ in classes), count - sum(wanted for _, wanted in classes))
    if rest[1] >= 1:
        classes.append(rest)
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in classes)
    degrees = len(classes) - 1
    assert statistic < degrees + 3.1 * np.sqrt(2 * max(degrees, 1)) + 4  # above the 0.999 quantile


def kept_by(shares: np.ndarray[Any, Any], keeps: Callable[[list[int]], list[int]]) -> np.ndarray[Any, Any]:
    """Return the distribution restricted to the tokens that `keeps` returns, given the ids in order of probability."""
    made = np.zeros_like(shares)
    ids = keeps(np.argsort(-shares, kind="stable").tolist())
    made[ids] = shares[ids]
    return made


def check_temperature(llm: LLM) -> None:
    check_frequencies(first_tokens(llm, temperature=0.6), distribution(llm, 0.6))


def check_top_k(llm: LLM) -> None:
    check_frequencies(first_tokens(llm, top_k=3), kept_by(distribution(llm), lambda ids: ids[:3]))


def check_top_p(llm: LLM) -> None:
    shares = distribution(llm)
    sums = np.cumsum(np.sort(shares)[::-1])
    count = int((sums < 0.5).sum()) + 1
    check_frequencies(first_tokens(llm, top_p=0.5), kept_by(shares, lambda ids: ids[:count]))


def check_min_p(llm: LLM) -> None:
    shares = distribution(llm)
    heavy = kept_by(shares, lambda ids: [i for i in ids if shares[i] >= 0.4 * shares.max()])
    check_frequencies(first_tokens(llm, min_p=0.4), heavy)


def check_typical_p(llm: LLM) -> None:
    shares = distribution(llm)
    information = -np.log(shares)
    order = np.argsort(np.abs(information - (shares * information).sum()), kind="stable")
    count = int((np.cumsum(shares[order]) < 0.4).sum()) + 1
    typical = kept_by(shares, lambda _: order[:count].tolist())
    assert 2 < count < 200
    assert typical[shares.argmax()] == 0, "the most likely token is not typical here"
    check_frequencies(first_tokens(llm, typical_p=0.4), typical)


def check_allowed_token_ids(llm: LLM) -> None:
    allowed = [65, 70, 90, 200]
    assert set(one(llm, DRAWN, allowed_token_ids=tuple(allowed)).token_ids) <= set(allowed)
    check_frequencies(
        first_tokens(llm, allowed_token_ids=tuple(allowed)), kept_by(distribution(llm), lambda _: allowed)
    )
    refused(llm, "allowed_token_ids", allowed_token_ids=(259,))


def check_bad_words(llm: LLM) -> None:
    free = one(llm)
    for length in (1, 2, 4):
        ids = free.token_ids[3 : 3 + length]
        word = bytes(ids).decode("latin-1")
        if all(token < 128 for token in ids):
            made = one(llm, bad_words=(word,))
            assert word not in made.text
    ascii_only = one(llm, allowed_token_ids=tuple(range(97, 123)))
    word = ascii_only.text[4:7]
    made = one(llm, allowed_token_ids=tuple(range(97, 123)), bad_words=(word,))
    assert word not in made.text
    assert made.text[:6] == ascii_only.text[:6], "the other tokens of the word stay allowed"


def check_bad_word_token_ids(llm: LLM) -> None:
    free = one(llm).token_ids
    made = one(llm, bad_word_token_ids=(free[2:5],)).token_ids
    assert made[:4] == free[:4]
    assert made[4] != free[4]
    assert free[2:5] not in [made[i : i + 3] for i in range(len(made))]
    refused(llm, "bad_word_token_ids", bad_word_token_ids=((1, 259),))


def check_seed(llm: LLM) -> None:
    assert one(llm, DRAWN, seed=1) == one(llm, DRAWN, seed=1)
    assert one(llm, DRAWN, seed=1).token_ids != one(llm, DRAWN, seed=2).token_ids


def check_max_tokens(llm: LLM) -> None:
    made = one(llm, max_tokens=7)
    assert (len(made.token_ids), made.finish_reason) == (7, FinishReason.LENGTH)


def check_min_tokens(llm: LLM) -> None:
    free = one(llm, ignore_eos=False, logit_bias={256: 100.0})
    assert (free.token_ids, free.finish_reason, free.stop_reason) == ((256,), FinishReason.STOP, None)
    late = one(llm, ignore_eos=False, logit_bias={256: 100.0}, min_tokens=5)
    assert (len(late.token_ids), late.token_ids[5]) == (6, 256)
    stopped = one(llm, logit_bias={70: 100.0}, stop_token_ids=(70,), min_tokens=3)
    assert (len(stopped.token_ids), stopped.stop_reason) == (4, 70)
    text = one(llm, logit_bias={65: 100.0}, stop=("AA",), min_tokens=4)
    assert (text.text, len(text.token_ids), text.stop_reason) == ("AAA", 5, "AA")


def check_presence_penalty(llm: LLM) -> None:
    # At the second token, 65 leads `other` by 1 nat without a penalty; at the first token, by more.
    now, then = np.log(distribution(llm)), np.log(distribution(llm, prompt=[*PROMPT, 65]))
    ahead = (now[65] - now) - (then[65] - then)
    other = int(ahead.argmax())
    assert ahead[other] > 0
    bias = {other: float(then[65] - then[other]) - 1.0}
    pair: dict[str, Any] = {"allowed_token_ids": (65, other), "logit_bias": bias, "max_tokens": 2}
    assert one(llm, **pair).token_ids == (65, 65)
    assert one(llm, presence_penalty=0.9, **pair).token_ids == (65, 65)
    assert one(llm, presence_penalty=1.1, **pair).token_ids == (65, other)
    assert one(llm, frequency_penalty=1.1, **pair).token_ids == (65, other)


def check_frequency_penalty(llm: LLM) -> None:
    pair = {"allowed_token_ids": (65, 66), "logit_bias": {65: 100.0, 66: 90.0}}
    assert one(llm, **pair).token_ids == (65,) * 12
    counts = Counter(one(llm, frequency_penalty=2.0, max_tokens=40, **pair).token_ids)
    assert counts[66] > 5


def check_repetition_penalty(llm: LLM) -> None:
    free = one(llm)
    made = one(llm, repetition_penalty=50.0)
    assert len(set(made.token_ids)) == len(made.token_ids), "no token is repeated"
    assert not set(made.token_ids) & set(PROMPT)
    assert made.token_ids != free.token_ids


def check_logit_bias(llm: LLM) -> None:
    assert one(llm, logit_bias={7: 100.0}).token_ids == (7,) * 12
    refused(llm, "logit_bias", logit_bias={259: 1.0})


def check_stop(llm: LLM) -> None:
    made = one(llm, logit_bias={65: 100.0}, stop=("AAA",))
    assert (made.text, made.finish_reason, made.stop_reason) == ("", FinishReason.STOP, "AAA")
    assert len(made.token_ids) == 3


def check_include_stop_str_in_output(llm: LLM) -> None:
    assert one(llm, logit_bias={65: 100.0}, stop=("AAA",), include_stop_str_in_output=True).text == "AAA"


def check_stop_token_ids(llm: LLM) -> None:
    made = one(llm, logit_bias={65: 100.0}, stop_token_ids=(65, 66))
    assert (made.token_ids, made.finish_reason, made.stop_reason) == ((65,), FinishReason.STOP, 65)
    refused(llm, "stop_token_ids", stop_token_ids=(259,))


def check_ignore_eos(llm: LLM) -> None:
    assert one(llm, logit_bias={258: 100.0}).token_ids == (258,) * 12
    assert one(llm, logit_bias={258: 100.0}, ignore_eos=False).token_ids == (258,)


def check_skip_special_tokens(llm: LLM) -> None:
    assert one(llm, logit_bias={258: 100.0}, max_tokens=2).text == ""
    assert one(llm, logit_bias={258: 100.0}, max_tokens=2, skip_special_tokens=False).text == "<|im_end|><|im_end|>"


def check_logprobs(llm: LLM) -> None:
    made = one(llm, logprobs=20)
    assert [token.top[0][0] for token in made.logprobs] == list(made.token_ids)
    assert {len(token.top) for token in made.logprobs} == {20}
    assert one(llm).logprobs == ()
    shares = distribution(llm)
    found = dict(made.logprobs[0].top)
    assert [found[t] for t in found] == pytest.approx([np.log(shares[t]) for t in found], abs=1e-9)


def check_prompt_logprobs(llm: LLM) -> None:
    """Check that the log-probabilities of an output equal those of the same tokens in a prompt."""
    made = one(llm, logprobs=3)
    whole = [*PROMPT, *made.token_ids]
    scored = one(llm, prompt=whole, max_tokens=1, prompt_logprobs=3).prompt_logprobs
    assert scored is not None
    assert [t.token_id for t in scored] == whole[1:]
    assert [(t.logprob, t.top) for t in scored[len(PROMPT) - 1 :]] == [(t.logprob, t.top) for t in made.logprobs]
    assert {t.rank for t in scored[len(PROMPT) - 1 :]} == {1}
    assert all(t.top[t.rank - 1] == (t.token_id, t.logprob) for t in scored if t.rank <= 3)
    assert one(llm).prompt_logprobs is None


def check_truncate_prompt_tokens(llm: LLM) -> None:
    assert one(llm, truncate_prompt_tokens=4).prompt_token_ids == tuple(PROMPT[-4:])
    assert one(llm, truncate_prompt_tokens=4).token_ids == one(llm, prompt=PROMPT[-4:]).token_ids
    filled = one(llm, prompt=[5] * 3000, truncate_prompt_tokens=-1)
    assert len(filled.prompt_token_ids) == 2048 - 12
    refused(llm, "prompt", prompt=[5] * 3000)


def check_speculation(_: LLM) -> None:
    speculative = LLM("tiny", dtype="float32", kv_memory=16 << 20, speculation="ngram?k=4&min=1")
    drafted: list[int] = []
    speculative.runner.watch = lambda plan: drafted.append(sum(s.num_drafts for s in plan.scheduled))
    without = one(speculative, prompt=[9, 9, 9, 9], max_tokens=24, speculation=False)
    assert sum(drafted) == 0
    assert one(speculative, prompt=[9, 9, 9, 9], max_tokens=24).token_ids == without.token_ids
    assert sum(drafted) > 0


def check_constraint(llm: LLM) -> None:
    made = one(llm, DRAWN, constraint=Constraint(ConstraintKind.CHOICE, '["no", "yes"]'), max_tokens=8)
    assert made.text in ("no", "yes")


def refused(llm: LLM, field: str, **changes: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        one(llm, **changes)
    assert caught.value.field == field


EFFECTS: dict[str, Callable[[LLM], None]] = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_") and name != "check_frequencies"
}


@pytest.mark.parametrize("field", EFFECTS)
def test_a_field_has_its_effect(llm: LLM, field: str) -> None:
    EFFECTS[field](llm)
    assert llm.engine.is_idle


NOT_SAMPLING = {
    "model", "prompt", "stream", "stream_options", "n", "return_token_ids", "priority", "cache_salt", "echo", "best_of",
    "use_beam_search", "length_penalty", "early_stopping", *CacheHintFields.model_fields,
}  # fmt: skip
"""Fields of a completion request that are not in `SamplingParams`; `test_openai_choices` and `test_beams` test those
that change the choices.
"""
ENGINE_ONLY = {"bad_word_token_ids"}
"""Fields that the conversion of text requests to tokens fills."""


def test_every_field_has_a_check_and_is_in_every_interface() -> None:
    known = {field.name for field in fields(SamplingParams)}
    assert set(EFFECTS) == known, "write a check that fails if the field is ignored"
    assert {field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields} == known
    for schema in (ChatRequest, CompletionRequest):
        names = {info.alias or name for name, info in schema.model_fields.items()}
        missing = known - names - ENGINE_ONLY - {"constraint"}
        assert missing == set(), f"{schema.__name__} lacks {missing}"
    names = {info.alias or name for name, info in CompletionRequest.model_fields.items()}
    constraints = {info.alias or name for name, info in ConstraintFields.model_fields.items()}
    assert names - known - constraints == NOT_SAMPLING


COMPANY = {
    "typical": replace(DRAWN, typical_p=0.7),
    "allowed": replace(DRAWN, allowed_token_ids=tuple(range(60, 120))),
    "bad words": replace(GREEDY, bad_word_token_ids=((65,), (170, 20))),
    "penalties": replace(DRAWN, presence_penalty=1.0, repetition_penalty=1.2, min_tokens=3),
    "scored": replace(DRAWN, prompt_logprobs=2, logprobs=1),
    "all": replace(
        DRAWN, typical_p=0.9, top_k=50, min_p=0.01, allowed_token_ids=tuple(range(200)), bad_word_token_ids=((3, 4),)
    ),
}


def results(engine_of: LLM, requests: Sequence[EngineRequest]) -> dict[str, tuple[Any, ...]]:
    """Run requests in one engine; return tokens with log-probabilities, and scores, by request."""
    for request in requests:
        engine_of.engine.add(request)
    tokens: dict[str, list[Any]] = {request.request_id: [] for request in requests}
    scores: dict[str, Any] = {}
    while engine_of.engine.has_work:
        output = engine_of.engine.step()
        for update in output.updates:
            assert update.error is None
            tokens[update.request_id] += update.tokens
            if update.scores is not None:
                assert update.request_id not in scores
                scores[update.request_id] = update.scores
        for number in output.exports.values():
            engine_of.engine.release_export(number)
    return {name: (tuple(made), scores.get(name)) for name, made in tokens.items()}


def requests_of(names: Sequence[str], **more: Any) -> list[EngineRequest]:
    return [EngineRequest(RequestId(name), [*PROMPT, *name.encode()], COMPANY[name], **more) for name in names]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[str, tuple[Any, ...]]:
    return {name: results(llm, requests_of([name]))[name] for name in COMPANY}


def test_results_do_not_depend_on_the_batch(llm: LLM, alone: dict[str, tuple[Any, ...]]) -> None:
    assert results(llm, requests_of(list(COMPANY))) == alone
    assert results(llm, requests_of(list(COMPANY)[::-2])) == {name: alone[name] for name in list(COMPANY)[::-2]}
    assert len({made[0] for made in alone.values()}) == len(alone)


def test_results_do_not_depend_on_chunks_and_preemption(llm: LLM, alone: dict[str, tuple[Any, ...]]) -> None:
    limits = SchedulerLimits(max_chunk_tokens=7, max_scored_rows=3, reserve_share=0.0)
    small = LLM("tiny", dtype="float32", kv_memory=16 * llm.block_bytes // 4, block_tokens=4, limits=limits)
    assert results(small, requests_of(list(COMPANY))) == alone
    assert small.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("name", COMPANY)
def test_results_do_not_depend_on_the_worker_that_continues(
    llm: LLM, alone: dict[str, tuple[Any, ...]], name: str
) -> None:
    """A prefill worker samples the first token, a second worker the next ones, and a third worker the last ones."""
    (request,) = requests_of([name])
    tokens, scores = alone[name]
    first, first_scores = results(llm, [replace(request, exports=True)])[name]
    assert (first, first_scores) == (tokens[:1], scores)
    sampling = replace(request.sampling, prompt_logprobs=None)
    for count in (1, 7):
        ids = [*request.token_ids, *(token.token_id for token in tokens[:count])]
        resumed = replace(request, token_ids=ids, num_generated=count, sampling=sampling)
        assert results(llm, [resumed])[name] == (tokens[count:], None)
