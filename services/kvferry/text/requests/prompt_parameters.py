"""Converts sampling parameters that need a tokenizer or the prompt: `bad_words`, `truncate_prompt_tokens`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from kvferry.core.errors import InvalidRequest
from kvferry.core.sampling import MAX_ANSWER_LOGPROBS, MAX_BAD_WORD_SEQUENCES, MAX_PROMPT_LOGPROBS, SamplingParams


class Encoder(Protocol):
    """A tokenizer that converts text to token ids."""

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Convert text to token ids; `add_special` adds the model's special tokens."""
        ...


def kept_prompt(token_ids: Sequence[int], sampling: SamplingParams, context_tokens: int) -> Sequence[int]:
    """Return the part of a prompt that `truncate_prompt_tokens` keeps: its last tokens.

    Args:
        token_ids: the whole prompt.
        sampling: the client's parameters.
        context_tokens: context length, prompt and output.
    """
    limit = sampling.truncate_prompt_tokens
    if limit is None:
        return token_ids
    if limit < 0:
        limit = max(1, context_tokens - (sampling.max_tokens or 1))
    return token_ids[-limit:]


def with_bad_word_tokens(sampling: SamplingParams, tokenizer: Encoder) -> SamplingParams:
    """Convert `bad_words` to token sequences, which are added to `bad_word_token_ids`. Each word is converted with and
    without a space before it, since most vocabularies have different tokens for the two.

    Args:
        sampling: parameters of the request.
        tokenizer: encodes the words.

    Raises:
        InvalidRequest: a word cannot be encoded, or there are too many sequences.
    """
    if not sampling.bad_words:
        return sampling
    found = list(sampling.bad_word_token_ids)
    for word in sampling.bad_words:
        bare = word.lstrip()
        for spelling in (bare, f" {bare}") if bare else (word,):
            try:
                ids = tuple(tokenizer.encode(spelling, add_special=False))
            except InvalidRequest as error:
                raise InvalidRequest(
                    f"a string of bad_words cannot be encoded: {error.message}", field="bad_words"
                ) from None
            if ids and ids not in found:
                found.append(ids)
    if len(found) > MAX_BAD_WORD_SEQUENCES:
        raise InvalidRequest(
            f"bad_words and bad_word_token_ids have {len(found)} sequences of tokens; at most "
            f"{MAX_BAD_WORD_SEQUENCES} are accepted",
            field="bad_words",
        )
    return replace(sampling, bad_words=(), bad_word_token_ids=tuple(found))


def check_output_length(sampling: SamplingParams) -> None:
    """Check that `min_tokens` is at most `max_tokens`.

    Raises:
        InvalidRequest: `min_tokens` is greater than `max_tokens`.
    """
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest(
            f"min_tokens must be at most max_tokens ({sampling.max_tokens}), not {sampling.min_tokens}",
            field="min_tokens",
        )


def check_prompt_logprobs(sampling: SamplingParams, num_prompt: int) -> None:
    """Check that the prompts' log-probabilities stay within the limit.

    Args:
        sampling: parameters of the request.
        num_prompt: number of tokens of its prompts, counted for each sample.

    Raises:
        InvalidRequest: there are too many tokens for this number of log-probabilities per token.
    """
    if sampling.prompt_logprobs is None:
        return
    count = num_prompt * (sampling.prompt_logprobs + 1)
    if count > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs is {sampling.prompt_logprobs}, which needs {count} log-probabilities for {num_prompt} "
            f"prompt tokens, counted for each sample; at most {MAX_PROMPT_LOGPROBS} are returned: reduce it, or "
            "shorten the prompt",
            field="prompt_logprobs",
        )


def check_answer_logprobs(sampling: SamplingParams, num_samples: int) -> None:
    """Check that the log-probabilities of an answer that is sent as a whole stay within the limit. A single sample may
    always have those of the whole context.

    Args:
        sampling: complete parameters of the request.
        num_samples: number of samples of all prompts.

    Raises:
        InvalidRequest: the answer may have too many log-probabilities.
    """
    if sampling.logprobs is None or sampling.max_tokens is None or num_samples == 1:
        return
    count = num_samples * sampling.max_tokens * (sampling.logprobs + 1)
    if count > MAX_ANSWER_LOGPROBS:
        raise InvalidRequest(
            f"{num_samples} samples of up to {sampling.max_tokens} tokens may have {count} log-probabilities; at most "
            f"{MAX_ANSWER_LOGPROBS} are kept for an answer that is not streamed: set stream, or reduce max_tokens, n "
            "or the number of log-probabilities per token",
            field="logprobs",
        )


def token_fields(sampling: SamplingParams) -> dict[str, Sequence[int]]:
    """Return the token ids in each parameter that has some, by name; all must be in the vocabulary."""
    return {
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": tuple(sampling.logit_bias),
        "allowed_token_ids": sampling.allowed_token_ids,
        "bad_word_token_ids": [token for word in sampling.bad_word_token_ids for token in word],
    }
