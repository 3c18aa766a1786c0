"""Tokenizes prompts and prepares chats for generation: prompt, splitting of the answer, grammar if a call is required.

Requests are validated as far as this is possible without a worker.
"""

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvferry.core.errors import InvalidRequest, UnknownModel, context_overflow, shortened
from kvferry.core.inference.tools import ToolMode, ToolUse
from kvferry.core.sampling import SamplingParams
from kvferry.serving.text_model import ChatMessages, TextModel
from kvferry.text.answers.answer import SplitOptions
from kvferry.text.requests.answer_rules import answer_rules, opens_reasoning
from kvferry.text.requests.prompt_parameters import check_output_length, token_fields, with_bad_word_tokens
from kvferry.text.tools.conversations import PromptEnd, check_calls, with_names

MAX_MESSAGES = 4096
"""Maximum number of messages in a conversation."""
MAX_SCHEMA_CHARS = 2048
"""Maximum length of the schemas of tools whose grammar is prepared on an event loop."""
_NO_TOOLS = ToolUse()

DrawSeed = Callable[[], int]


class BlocksEventLoop(Exception):
    """The preparation of a request would block the event loop; it must run elsewhere, see `TextModel.is_off_loop`."""


def draw_seed() -> int:
    """Generate a seed for a request without a seed: 63 random bits."""
    return secrets.randbits(63)


def check_model(model: TextModel, name: str) -> None:
    """Check that `name` is the served model's name or empty.

    Raises:
        UnknownModel: a different model is requested.
    """
    if name not in ("", model.name):
        raise UnknownModel(f"model {shortened(name)!r} is not served here; use {model.name!r}", field="model")


def check_num_chars(model: TextModel, num_chars: int) -> None:
    """Reject text that exceeds the context length however it is tokenized.

    Args:
        model: the served model.
        num_chars: number of characters of the text.

    Raises:
        InvalidRequest: the text has more characters than a full context of tokens can encode.
    """
    if num_chars > model.max_prompt_chars:
        context = model.max_model_tokens
        raise context_overflow(math.ceil(num_chars * context / model.max_prompt_chars), context, num_chars=num_chars)


def encode_text(model: TextModel, text: str) -> list[int]:
    """Tokenize plain text.

    Args:
        model: the served model.
        text: the text; special tokens are added to it.

    Raises:
        InvalidRequest: the text is too long, or cannot be encoded.
    """
    check_num_chars(model, len(text))
    return model.tokenizer.encode(text, add_special=True)


def check_num_messages(count: int) -> None:
    """Reject a conversation with too many messages.

    Raises:
        InvalidRequest: the conversation has more than `MAX_MESSAGES` messages.
    """
    if count > MAX_MESSAGES:
        raise InvalidRequest(f"messages has {count} messages; at most {MAX_MESSAGES} are accepted", field="messages")


def encode_chat(
    model: TextModel,
    messages: ChatMessages,
    use: ToolUse = _NO_TOOLS,
    variables: Mapping[str, object] | None = None,
    end: PromptEnd = PromptEnd.ANSWER,
) -> list[int]:
    """Tokenize a conversation.

    Args:
        model: tokenizer and chat template.
        messages: messages of the conversation, oldest first.
        use: the tools that are offered.
        variables: further variables of the chat template.
        end: how the prompt ends.

    Raises:
        InvalidRequest: the number or length of messages is out of range, a message of role `tool` does not match a
            call, the model has no chat template, or the template rejects the messages.
    """
    if not messages:
        raise InvalidRequest("messages is empty; send at least one message", field="messages")
    check_num_messages(len(messages))
    check_calls(messages)
    if model.encode_chat is None:
        raise InvalidRequest(
            f"model {model.name!r} has no chat template; use the completions API with plain text",
            field="messages",
        )
    messages = with_names(messages)
    check_num_chars(model, num_chars([*messages, *(tool.as_template_input() for tool in use.offered), variables]))
    return model.encode_chat(messages, use.offered, variables or {}, end)


def num_chars(value: object) -> int:
    """Return the number of characters of all values in messages and tools."""
    total, left = 0, [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            total += len(part)
        elif isinstance(part, Mapping):
            left += part.values()
        elif isinstance(part, list | tuple):
            left += part
    return total


def check_token_ids(model: TextModel, token_ids: Sequence[int], field: str) -> None:
    """Check that all token ids are in the vocabulary.

    Args:
        model: the served model.
        token_ids: the ids.
        field: name of the request's field, for error messages.

    Raises:
        InvalidRequest: an id is out of range; the message contains the first such id.
    """
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < model.vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < model.vocab_size)
        named = str(wrong) if wrong.bit_length() <= 64 else "of more than 64 bits"
        raise InvalidRequest(
            f"{field} holds token id {named}; the vocabulary of {model.name!r} has ids 0 to {model.vocab_size - 1}",
            field=field,
        )


def check_num_tokens(model: TextModel, num_prompt: int, context_tokens: int | None = None) -> None:
    """Reject a prompt that fills the whole context.

    Args:
        model: its context length applies if `context_tokens` is `None`.
        num_prompt: number of prompt tokens.
        context_tokens: context length of the workers; `None` for the model's.

    Raises:
        InvalidRequest: the context has no tokens left for the output.
    """
    context = model.max_model_tokens if context_tokens is None else context_tokens
    if num_prompt >= context:
        raise context_overflow(num_prompt, context)


def fit(
    model: TextModel, token_ids: Sequence[int], sampling: SamplingParams, context_tokens: int, new_seed: DrawSeed
) -> SamplingParams:
    """Complete the sampling parameters for this prompt: limit `max_tokens` to the context, set `seed`, convert
    `bad_words` to token ids.

    Args:
        model: the served model, for its vocabulary.
        token_ids: the prompt, truncated if the request enables it.
        sampling: the client's parameters.
        context_tokens: the workers' context length, prompt and output.
        new_seed: function that generates a seed, called if the request has no seed.

    Raises:
        InvalidRequest: the prompt is empty or fills the context, a token id is not in the vocabulary, or fields
            contradict each other.
    """
    num_prompt = len(token_ids)
    if num_prompt == 0:
        raise InvalidRequest("the prompt is empty; send at least one token", field="prompt", reason="PROMPT_EMPTY")
    check_num_tokens(model, num_prompt, context_tokens)
    check_token_ids(model, token_ids, "prompt")
    sampling = with_bad_word_tokens(sampling, model.tokenizer)
    for field, ids in token_fields(sampling).items():
        check_token_ids(model, ids, field)
    check_output_length(sampling)
    room = context_tokens - num_prompt
    return replace(
        sampling,
        max_tokens=room if sampling.max_tokens is None else min(room, sampling.max_tokens),
        truncate_prompt_tokens=None,
        seed=new_seed() if sampling.seed is None else sampling.seed,
    )


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A prompt, usually of a chat, in the form that the token source takes."""

    token_ids: Sequence[int]
    sampling: SamplingParams
    split: SplitOptions | None = None
    """Options for splitting the answer; `None` if it is not split."""


def prepare_chat(
    model: TextModel,
    messages: ChatMessages,
    use: ToolUse,
    sampling: SamplingParams,
    variables: Mapping[str, object] | None = None,
    end: PromptEnd = PromptEnd.ANSWER,
    *,
    max_reasoning_tokens: int | None = None,
    stops_in_reasoning: bool = False,
) -> PreparedChat:
    """Tokenize a conversation with its tools, and complete the sampling parameters for tool calls.

    Args:
        model: tokenizer, chat template and form of answers.
        messages: messages of the conversation, oldest first.
        use: the tools that are offered, and how they may be used.
        sampling: sampling parameters of the request.
        variables: further variables of the chat template.
        end: how the prompt ends.
        max_reasoning_tokens: maximum number of tokens of the reasoning; `None` for no limit.
        stops_in_reasoning: whether stop strings end the reasoning too.

    Raises:
        BlocksEventLoop: the schemas of a call must be prepared elsewhere.
        InvalidRequest: see `encode_chat`; a message of role `tool` does not match a call; a call is required
            together with another constraint, or with a schema that no grammar can express.
    """
    has_grammar = use.choice is ToolMode.REQUIRED or sampling.constraint is not None
    if has_grammar and not model.is_off_loop and sum(len(repr(t.schema)) for t in use.offered) > MAX_SCHEMA_CHARS:
        raise BlocksEventLoop
    ids = encode_chat(model, messages, use, variables, end)
    form = model.answer_form
    is_open = opens_reasoning(form, ids, model.new_detokenizer(False, form.marks.by_token))
    sampling, split = answer_rules(form, use, sampling, is_open=is_open, max_reasoning_tokens=max_reasoning_tokens)
    if split is not None and stops_in_reasoning:
        split = replace(split, stops_in_reasoning=True)
    return PreparedChat(ids, sampling, split)
