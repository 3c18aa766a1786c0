"""Sampling parameters: how tokens are sampled and when a sequence ends."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.core.constraint import Constraint
from kvferry.core.errors import InvalidRequest, shortened

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_OUTPUT_TOKENS = 1 << 20
MAX_PRIORITY = 1000
"""Largest absolute value of a request's priority."""
MAX_ANSWER_LOGPROBS = 1 << 20
"""Maximum number of log-probabilities of an answer that is sent as a whole: about 150 bytes each."""
MAX_PROMPT_LOGPROBS = 1 << 16
"""Maximum number of log-probabilities of a prompt: its tokens times (`prompt_logprobs` + 1)."""
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 256
MAX_BAD_WORD_SEQUENCES = 2 * MAX_BAD_WORDS
"""Maximum number of token sequences of bad words; a word has up to two."""
MAX_BAD_WORD_TOKENS = 4 * (MAX_BAD_WORD_CHARS + 1)
"""Maximum number of tokens of a bad word: one per UTF-8 byte of its characters and of the space before it."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Bounds of the repetition penalty: a logit is multiplied or divided by at most 100, so that it stays finite."""


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a numeric field accepts."""

    low: float
    high: float
    is_whole: bool = True
    is_open_below: bool = False
    """Whether `low` itself is excluded."""
    is_optional: bool = False
    """Whether `None` is accepted."""

    def check(self, name: str, value: float | None) -> None:
        """Check a value of field `name`.

        Raises:
            InvalidRequest: the value is out of range or has the wrong type.
        """
        if self.is_whole:
            _whole(name, value, int(self.low), int(self.high), optional=self.is_optional)  # type: ignore[arg-type]
        else:
            _real(name, value, self.low, self.high, open_below=self.is_open_below)


RANGES: Mapping[str, Range] = {
    "max_tokens": Range(1, MAX_OUTPUT_TOKENS, is_optional=True),
    "min_tokens": Range(0, MAX_OUTPUT_TOKENS),
    "temperature": Range(0.0, 100.0, is_whole=False),
    "top_p": Range(0.0, 1.0, is_whole=False, is_open_below=True),
    "top_k": Range(-1, 1 << 31),
    "min_p": Range(0.0, 1.0, is_whole=False),
    "seed": Range(-(1 << 63), (1 << 64) - 1, is_optional=True),
    "presence_penalty": Range(-2.0, 2.0, is_whole=False),
    "frequency_penalty": Range(-2.0, 2.0, is_whole=False),
    "repetition_penalty": Range(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY, is_whole=False),
    "logprobs": Range(0, MAX_TOP_LOGPROBS, is_optional=True),
    "prompt_logprobs": Range(0, MAX_TOP_LOGPROBS, is_optional=True),
    "typical_p": Range(0.0, 1.0, is_whole=False, is_open_below=True),
    "truncate_prompt_tokens": Range(-1, MAX_OUTPUT_TOKENS, is_optional=True),
}
"""Ranges of the numeric fields of `SamplingParams`."""


class FinishReason(StrEnum):
    """Reason why a sequence ended. The first two values are OpenAI's."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens` or the model's context length was reached."""
    ABORT = "abort"
    """Generation was paused with mode `abort`."""
    CANCELLED = "cancelled"
    """The caller disconnected or cancelled the request."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request; fields that OpenAI's API has use OpenAI's defaults."""

    max_tokens: int | None = None
    """Maximum number of generated tokens; `None` for as many as fit in the context."""
    min_tokens: int = 0
    """Minimum number of tokens before an end-of-sequence or stop token can be sampled."""
    temperature: float = 1.0
    """Sampling temperature, from 0 to 100; 0 selects greedy decoding: the most likely token, or the lowest id of
    equally likely ones."""
    top_p: float = 1.0
    """Keep the most likely tokens whose probabilities sum to this value; greater than 0 and at most 1."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all, and so does -1, which becomes 0."""
    min_p: float = 0.0
    """Drop tokens whose probability is below this fraction of the largest probability; from 0 to 1."""
    seed: int | None = None
    """Seed of the random number generator; if it is `None`, the gateway chooses a seed, which all workers use for this
    request."""
    presence_penalty: float = 0.0
    """Value subtracted from the logits of tokens that were generated; from -2 to 2."""
    frequency_penalty: float = 0.0
    """Value subtracted from a token's logit once per occurrence in the output; from -2 to 2."""
    repetition_penalty: float = 1.0
    """Factor that divides positive and multiplies negative logits of tokens in the prompt or output; from 0.01 to
    100."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Bias by token id, added to the token's logit; from -100 to 100."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; the text is cut before the first match."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the sequence and stay in the output."""
    ignore_eos: bool = False
    """Whether generation continues after an end-of-sequence token; for benchmarks with a fixed output length. A
    constrained output ends with it nevertheless, since no token can follow."""
    logprobs: int | None = None
    """Number of alternative tokens with log-probabilities per sampled token; 0 returns only that of the sampled token;
    `None` disables log-probabilities."""
    constraint: Constraint | None = None
    """Grammar or schema that the output satisfies; `None` leaves the output free."""
    typical_p: float = 1.0
    """Keep the tokens whose information content is closest to the entropy, until their probabilities sum to this value;
    greater than 0 and at most 1, which keeps all (Meister et al., Locally Typical Sampling, 2023)."""
    allowed_token_ids: tuple[int, ...] = ()
    """Token ids that can be sampled; empty for all."""
    bad_words: tuple[str, ...] = ()
    """Strings that the output must not contain, each with and without a space before it. They are converted to
    `bad_word_token_ids` where the prompt is tokenized; an engine ignores them.
    """
    bad_word_token_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that the output must not contain: the last id is banned after the others."""
    include_stop_str_in_output: bool = False
    """Whether the text ends after the stop string that was found, and not before it."""
    skip_special_tokens: bool = True
    """Whether control tokens are omitted from the text."""
    truncate_prompt_tokens: int | None = None
    """Number of tokens at the end of the prompt to keep; -1 keeps as many as fit in the context together with
    `max_tokens`; `None` rejects a prompt that is too long. Applied where the prompt is tokenized; an engine ignores it.
    """
    prompt_logprobs: int | None = None
    """Number of alternative tokens with log-probabilities per token of the prompt, from the second one on; 0 returns
    only that of the token itself; `None` disables them. All rows of the prompt must then be computed, so the prefix
    cache and other workers' KV are not used for it."""
    speculation: bool = True
    """Whether a worker with speculation verifies draft tokens for this request. Tokens are the same either way, except
    with the rejection rule, which keeps their distribution."""

    def __post_init__(self) -> None:
        """Check the range of every field.

        Raises:
            InvalidRequest: a field is out of range; the message contains the field, its value and the range.
        """
        for name, limits in RANGES.items():
            limits.check(name, getattr(self, name))
        if self.top_k == -1:  # as in vLLM; the wire has no sign
            object.__setattr__(self, "top_k", 0)
        if not isinstance(self.logit_bias, Mapping):
            raise _wrong_type("logit_bias", "a mapping from token ids to biases", self.logit_bias)
        if not isinstance(self.constraint, Constraint | None):
            raise _wrong_type("constraint", "a Constraint", self.constraint)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias has {len(self.logit_bias)} tokens; at most {MAX_LOGIT_BIAS} are accepted",
                field="logit_bias",
            )
        for token, bias in self.logit_bias.items():
            _whole("logit_bias", token, 0, 1 << 31, of="a token id of ")
            _real("logit_bias", bias, -100.0, 100.0)
        _strings("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_CHARS)
        _ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        _ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
        _strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        _check_list("bad_word_token_ids", self.bad_word_token_ids, "lists of token ids")
        _at_most("bad_word_token_ids", len(self.bad_word_token_ids), MAX_BAD_WORD_SEQUENCES, "sequences")
        for sequence in self.bad_word_token_ids:
            if not sequence:
                raise InvalidRequest("bad_word_token_ids has an empty sequence", field="bad_word_token_ids")
            _ids("bad_word_token_ids", sequence, MAX_BAD_WORD_TOKENS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "speculation"):
            check_flag(name, getattr(self, name))
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens is 0, which keeps no tokens; set -1 to fill the context, or leave it out",
                field="truncate_prompt_tokens",
            )

    @property
    def is_greedy(self) -> bool:
        """Whether decoding is greedy: the most likely token is always chosen."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token. Log-probabilities refer to the model's distribution, before temperature and penalties."""

    token_id: int
    logprob: float | None = None
    """Log-probability of the token; `None` if the request did not set `logprobs`."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the most likely tokens, most likely first."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of a prompt with its log-probability after the tokens before it; refers to the model's distribution."""

    token_id: int
    logprob: float
    rank: int
    """Rank of the token among all tokens, 1 for the most likely; of equally likely tokens, the lowest id is first."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the most likely tokens, most likely first."""


def _at_most(name: str, count: int, limit: int, unit: str) -> None:
    if count > limit:
        raise InvalidRequest(f"{name} has {count} {unit}; at most {limit} are accepted", field=name)


def _wrong_type(name: str, expected: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"{name} must be {expected}, not {shortened(repr(value))}", field=name)


def _check_list(name: str, values: object, items: str) -> None:
    """Check that a value is a list or tuple: a string would count as a list of its characters."""
    if not isinstance(values, list | tuple):
        raise _wrong_type(name, f"a list of {items}", values)


def _strings(name: str, values: tuple[str, ...], limit: int, max_chars: int) -> None:
    _check_list(name, values, "strings")
    _at_most(name, len(values), limit, "strings")
    for text in values:
        if not isinstance(text, str):
            raise InvalidRequest(f"{name} must be a list of strings, not of {type(text).__name__}", field=name)
        if not text or len(text) > max_chars:
            raise InvalidRequest(
                f"a string of {name} has {len(text)} characters; 1 to {max_chars} are accepted", field=name
            )


def _ids(name: str, values: tuple[int, ...], limit: int) -> None:
    _check_list(name, values, "token ids")
    _at_most(name, len(values), limit, "ids")
    for token in values:
        _whole(name, token, 0, 1 << 31, of="an item of ")


def check_flag(name: str, value: object, *, or_else: str = "") -> None:
    """Check that a field is true or false.

    Args:
        name: name of the field.
        value: value of the field.
        or_else: a further value that the caller accepts, for the message.

    Raises:
        InvalidRequest: the value is not a boolean.
    """
    if not isinstance(value, bool):
        accepted = f"true, false or {or_else}" if or_else else "true or false"
        raise InvalidRequest(f"{name} must be {accepted}, not {shortened(repr(value))}", field=name)


def _whole(name: str, value: int | None, low: int, high: int, *, optional: bool = False, of: str = "") -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        shown = shortened(repr(value))
        raise InvalidRequest(f"{of}{name} must be a whole number from {low} to {high}, not {shown}", field=name)


def _real(name: str, value: float | None, low: float, high: float, *, open_below: bool = False) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value is None or value > high or value < low or (open_below and value == low):
        bounds = f"greater than {low} and at most {high}" if open_below else f"from {low} to {high}"
        raise InvalidRequest(f"{name} must be a number {bounds}, not {shortened(repr(value))}", field=name)


NO_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
"""Parameters of a request that samples no tokens, such as one for a vector."""
