"""How a request wants its tokens drawn and when it wants to stop."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.core.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_OUTPUT_TOKENS = 1 << 20


class FinishReason(StrEnum):
    """Why a sequence ended. The first two are OpenAI's words."""

    STOP = "stop"
    """End of sequence, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens` or the model's context was reached."""
    CANCELLED = "cancelled"
    """The caller went away or asked to stop."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's wishes; defaults are OpenAI's where OpenAI has the field."""

    max_tokens: int | None = None
    """Tokens to generate at most; `None`: as many as the context holds."""
    min_tokens: int = 0
    """End-of-sequence and stop token ids are not drawn before this many tokens."""
    temperature: float = 1.0
    """0 is greedy: the most likely token, the lowest id among equals."""
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one."""
    seed: int | None = None
    """`None`: the edge draws one, so that every worker that touches the request uses the same."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; the text is cut before the first one."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the sequence and stay in the output."""
    ignore_eos: bool = False
    """Go on past end of sequence; benchmarks of a fixed length need it."""
    logprobs: int | None = None
    """How many alternatives to report per token, 0 for the chosen token alone; `None`: no log-probabilities."""

    def __post_init__(self) -> None:
        """Check every bound.

        Raises:
            InvalidRequest: naming the field, its value and what would be accepted.
        """
        _whole("max_tokens", self.max_tokens, 1, MAX_OUTPUT_TOKENS, optional=True)
        _whole("min_tokens", self.min_tokens, 0, MAX_OUTPUT_TOKENS)
        _real("temperature", self.temperature, 0.0, 100.0)
        _real("top_p", self.top_p, 0.0, 1.0, open_below=True)
        _whole("top_k", self.top_k, 0, 1 << 31)
        _real("min_p", self.min_p, 0.0, 1.0)
        _whole("seed", self.seed, -(1 << 63), (1 << 64) - 1, optional=True)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_below=True)
        _whole("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS, optional=True)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias names {len(self.logit_bias)} tokens; at most {MAX_LOGIT_BIAS} are accepted",
                field="logit_bias",
            )
        for token, bias in self.logit_bias.items():
            _whole("logit_bias", token, 0, 1 << 31)
            _real("logit_bias", bias, -100.0, 100.0)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are accepted", field="stop"
            )
        for text in self.stop:
            if not text or len(text) > MAX_STOP_CHARS:
                raise InvalidRequest(
                    f"a stop string has {len(text)} characters; 1 to {MAX_STOP_CHARS} are accepted", field="stop"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are accepted",
                field="stop_token_ids",
            )
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, 1 << 31)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One drawn token; log-probabilities are of the model's own distribution, before temperature and penalties."""

    token_id: int
    logprob: float | None = None
    """`None` when the request asked for none."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens with their log-probabilities, most likely first."""


def _whole(name: str, value: int | None, low: int, high: int, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be a whole number from {low} to {high}, not {value!r}", field=name)


def _real(name: str, value: float, low: float, high: float, *, open_below: bool = False) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value > high or value < low or (open_below and value == low):
        bound = "above" if open_below else "from"
        raise InvalidRequest(f"{name} must be a number {bound} {low} to {high}, not {value!r}", field=name)
