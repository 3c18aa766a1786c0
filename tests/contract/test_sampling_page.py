"""docs/sampling.md lists the existing sampling parameters with their limits."""

import re
from dataclasses import MISSING, fields
from pathlib import Path

from kvferry.core import sampling
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.gateway.http.openai.generation import MAX_REQUEST_SAMPLES
from kvferry.rpc.wire import MAX_SAMPLES

PAGE = (Path(__file__).resolve().parents[2] / "docs/sampling.md").read_text("utf-8")
ROWS = {row[0]: row[1:] for row in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| .* \|$", PAGE, re.MULTILINE)}


def test_the_page_lists_every_parameter() -> None:
    first_table = PAGE[: PAGE.index("Fields of HTTP requests only")]
    assert set(re.findall(r"^\| `(\w+)` \|", first_table, re.MULTILINE)) == {f.name for f in fields(SamplingParams)}


def test_defaults_are_those_of_the_code() -> None:
    for field in fields(SamplingParams):
        default = () if field.default is MISSING else field.default
        shown = ROWS[field.name][1]
        if isinstance(default, bool):
            assert shown == str(default).lower()
        elif isinstance(default, int | float):
            assert float(shown) == default


def test_limits_are_those_of_the_code() -> None:
    limits = {
        "max_tokens": (sampling.MAX_OUTPUT_TOKENS,),
        "logit_bias": (sampling.MAX_LOGIT_BIAS,),
        "allowed_token_ids": (sampling.MAX_ALLOWED_TOKEN_IDS,),
        "bad_words": (sampling.MAX_BAD_WORDS, sampling.MAX_BAD_WORD_CHARS),
        "bad_word_token_ids": (sampling.MAX_BAD_WORD_SEQUENCES, sampling.MAX_BAD_WORD_TOKENS),
        "stop": (sampling.MAX_STOP_STRINGS, sampling.MAX_STOP_CHARS),
        "stop_token_ids": (sampling.MAX_STOP_TOKEN_IDS,),
        "logprobs": (sampling.MAX_TOP_LOGPROBS,),
        "prompt_logprobs": (sampling.MAX_TOP_LOGPROBS, sampling.MAX_PROMPT_LOGPROBS),
        "repetition_penalty": (sampling.MAX_REPETITION_PENALTY,),
        "truncate_prompt_tokens": (sampling.MAX_OUTPUT_TOKENS,),
    }
    for name, numbers in limits.items():
        for number in numbers:
            assert f"{int(number):,}" in ROWS[name][0], name
    assert f"1 to {MAX_SAMPLES} per prompt, {MAX_REQUEST_SAMPLES} per request" in PAGE
    assert f"At most {SchedulerLimits().max_scored_rows} rows of a step are scored" in PAGE
