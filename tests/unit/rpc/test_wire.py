import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.core.limits import MAX_TOKEN_IDS
from kvferry.core.philox import uniform
from kvferry.core.sampling import FinishReason, SampledToken, SamplingParams, ScoredToken
from kvferry.rpc import wire
from kvferry.v1 import common_pb2

_floats = st.floats(allow_nan=False, allow_infinity=False)
_ids = st.integers(0, (1 << 31) - 1)
_constraints = st.builds(
    Constraint,
    kind=st.sampled_from([k for k in ConstraintKind if k not in (ConstraintKind.JSON_OBJECT, ConstraintKind.CHOICE)]),
    source=st.text(min_size=1, max_size=8),
    after=st.sampled_from(["", "</think>"]),
) | st.sampled_from(
    [Constraint(ConstraintKind.JSON_OBJECT, ""), Constraint(ConstraintKind.CHOICE, '["yes", "nö"]', "</think>")]
)
_params = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 1 << 20),
    min_tokens=st.integers(0, 100),
    temperature=st.floats(0, 100),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 1 << 31),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 100),
    logit_bias=st.dictionaries(_ids, st.floats(-100, 100), max_size=4),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4).map(tuple),
    stop_token_ids=st.lists(_ids, max_size=4).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    constraint=st.none() | _constraints,
    typical_p=st.floats(0.01, 1),
    allowed_token_ids=st.lists(_ids, max_size=4).map(tuple),
    bad_words=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4).map(tuple),
    bad_word_token_ids=st.lists(st.lists(_ids, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    include_stop_str_in_output=st.booleans(),
    skip_special_tokens=st.booleans(),
    prompt_logprobs=st.none() | st.integers(0, 20),
    truncate_prompt_tokens=st.none() | st.just(-1) | st.integers(1, 1 << 20),
    speculation=st.booleans(),
)


@given(_params)
def test_sampling_survives_the_wire(params):
    parsed = common_pb2.SamplingParams.FromString(wire.sampling_to_wire(params).SerializeToString())
    assert wire.sampling_from_wire(parsed) == params


@given(st.integers(1 << 63, (1 << 64) - 1))
def test_a_large_unsigned_seed_draws_the_same_after_the_wire(seed):
    received = wire.sampling_from_wire(wire.sampling_to_wire(SamplingParams(seed=seed)))
    assert received.seed is not None
    assert uniform(received.seed, 0, 5) == uniform(seed, 0, 5)


def test_collections_are_bounded_before_they_are_copied():
    long = common_pb2.TokenIds(ids=[1] * 2000)
    for message, words in (
        (common_pb2.SamplingParams(allowed_token_ids=[1] * 2000), "allowed_token_ids has 2000 items"),
        (common_pb2.SamplingParams(bad_words=["a"] * 100), "bad_words has 100 items"),
        (common_pb2.SamplingParams(bad_word_token_ids=[long] * 200), "bad_word_token_ids has 200 items"),
        (common_pb2.SamplingParams(bad_word_token_ids=[long]), "bad_word_token_ids has 2000 ids; at most 1028"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            wire.sampling_from_wire(message)


def test_an_empty_message_means_the_defaults():
    assert wire.sampling_from_wire(common_pb2.SamplingParams()) == SamplingParams()


def test_a_bad_field_is_named():
    with pytest.raises(InvalidRequest) as caught:
        wire.sampling_from_wire(common_pb2.SamplingParams(max_tokens=0))
    assert caught.value.field == "max_tokens"
    with pytest.raises(InvalidRequest) as caught:
        wire.sampling_from_wire(common_pb2.SamplingParams(temperature=float("nan")))
    assert caught.value.field == "temperature"


@pytest.mark.parametrize(
    "token", [SampledToken(7), SampledToken(7, -0.5), SampledToken(7, -0.5, ((7, -0.5), (9, -2.0)))]
)
def test_tokens_survive_the_wire(token):
    assert wire.token_from_wire(wire.token_to_wire(token)) == token


@pytest.mark.parametrize("top", [(), ((7, -0.5), (9, -2.0))])
def test_scored_tokens_survive_the_wire(top):
    scores = (ScoredToken(7, -0.5, 1, top), ScoredToken(0, -3.5, 4000, top))
    assert wire.scores_from_wire(wire.scores_to_wire(scores)) == scores
    assert wire.scores_to_wire(None) == []


@pytest.mark.parametrize("reason", [None, FinishReason.STOP, FinishReason.LENGTH])
def test_finish_reasons_survive_the_wire(reason):
    assert wire.finish_from_wire(wire.finish_to_wire(reason)) is reason


def test_a_cancelled_stream_has_no_finish_reason_on_the_wire():
    with pytest.raises(ValueError, match="status"):
        wire.finish_to_wire(FinishReason.CANCELLED)


def test_sizes_are_bounded():
    with pytest.raises(InvalidRequest, match="1048577 token ids"):
        wire.token_ids_from_wire(range(MAX_TOKEN_IDS + 1), "tokens")
    with pytest.raises(InvalidRequest, match="n must be"):
        wire.num_samples_from_wire(wire.MAX_SAMPLES + 1)
    assert wire.num_samples_from_wire(0) == 1


@pytest.mark.parametrize("value", ["", "a" * 129, "two words", "a\nb", "ü", "a/../b"])
def test_request_ids_that_could_harm_a_log_are_refused(value):
    with pytest.raises(InvalidRequest):
        wire.check_request_id(value)


@pytest.mark.parametrize("message", [common_pb2.Constraint(), common_pb2.Constraint(json_object=False)])
def test_a_constraint_without_a_kind_is_rejected(message):
    with pytest.raises(InvalidRequest, match="set one of its fields") as caught:
        wire.constraint_from_wire(message)
    assert caught.value.field == "constraint"
