"""A request's way in: prompt to token ids, and every check that needs no worker. What passes here can run."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvferry.core.errors import InvalidRequest, UnknownModel
from kvferry.core.sampling import SamplingParams
from kvferry.rpc.text_model import ChatMessages, TextModel

_LONG_TEXT_CHARS = 16_384
"""From here tokenizing takes milliseconds and goes to a thread, so that other streams keep flowing."""

DrawSeed = Callable[[], int]


def draw_seed() -> int:
    """A seed for a request that brought none: 63 random bits."""
    return secrets.randbits(63)


def check_model(model: TextModel, name: str) -> None:
    """Accept the served model's name, or none.

    Raises:
        UnknownModel: another model is asked for.
    """
    if name not in ("", model.name):
        raise UnknownModel(f"model {name!r} is not served here; this is {model.name!r}", field="model")


async def encode_text(model: TextModel, text: str, *, add_special: bool = True) -> list[int]:
    """Token ids of plain text."""
    if len(text) < _LONG_TEXT_CHARS:
        return model.tokenizer.encode(text, add_special=add_special)
    return await asyncio.to_thread(model.tokenizer.encode, text, add_special=add_special)


async def encode_chat(model: TextModel, messages: ChatMessages) -> list[int]:
    """Token ids of a conversation, up to where the assistant's answer begins.

    Raises:
        InvalidRequest: there are no messages, the model has no chat template, or the template refuses them.
    """
    if not messages:
        raise InvalidRequest("messages is empty; give at least one message", field="messages")
    if model.encode_chat is None:
        raise InvalidRequest(
            f"model {model.name!r} has no chat template; send plain text to the completions interface",
            field="messages",
        )
    if sum(len(message["content"]) for message in messages) < _LONG_TEXT_CHARS:
        return model.encode_chat(messages)
    return await asyncio.to_thread(model.encode_chat, messages)


def check_token_ids(model: TextModel, token_ids: Sequence[int], field: str) -> None:
    """Accept ids of the vocabulary.

    Raises:
        InvalidRequest: the first id that is out of it.
    """
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < model.vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < model.vocab_size)
        raise InvalidRequest(
            f"{field} holds token id {wrong}; the vocabulary of {model.name!r} has ids 0 to {model.vocab_size - 1}",
            field=field,
        )


def fit(
    model: TextModel, token_ids: Sequence[int], sampling: SamplingParams, context_tokens: int, new_seed: DrawSeed
) -> SamplingParams:
    """The sampling parameters made definite for this prompt: `max_tokens` fits the context, `seed` is drawn.

    Args:
        model: whose vocabulary counts.
        token_ids: the whole prompt.
        sampling: as the client sent it.
        context_tokens: prompt and output together that the workers take.
        new_seed: called when the client sent none.

    Raises:
        InvalidRequest: the prompt is empty, fills the context, or an id is out of the vocabulary.
    """
    num_prompt = len(token_ids)
    if num_prompt == 0:
        raise InvalidRequest("the prompt is empty; give at least one token", field="prompt")
    if num_prompt >= context_tokens:
        raise InvalidRequest(
            f"the prompt has {num_prompt} tokens and the context holds {context_tokens}, prompt and output "
            f"together; shorten the prompt by at least {num_prompt - context_tokens + 1} tokens",
            field="prompt",
            reason="CONTEXT_LENGTH_EXCEEDED",
        )
    check_token_ids(model, token_ids, "prompt")
    check_token_ids(model, sampling.stop_token_ids, "stop_token_ids")
    check_token_ids(model, tuple(sampling.logit_bias), "logit_bias")
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {sampling.min_tokens}, above max_tokens {sampling.max_tokens}", field="min_tokens"
        )
    room = context_tokens - num_prompt
    return replace(
        sampling,
        max_tokens=room if sampling.max_tokens is None else min(room, sampling.max_tokens),
        seed=new_seed() if sampling.seed is None else sampling.seed,
    )
