"""Prepares a chat for generation: prompt, options for splitting the answer, and the grammar if a call is required."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.core.inference.tools import ToolUse
from kvferry.core.sampling import SamplingParams
from kvferry.serving import prompts
from kvferry.serving.text_model import ChatMessages, TextModel
from kvferry.text.answers.answer import SplitOptions
from kvferry.text.requests.answer_forms import opens_reasoning
from kvferry.text.requests.answer_rules import answer_rules
from kvferry.text.tools.history import check_calls, with_names


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
) -> PreparedChat:
    """Tokenize a conversation with its tools, and complete the sampling parameters for tool calls.

    Args:
        model: tokenizer, chat template and form of answers.
        messages: messages of the conversation, oldest first.
        use: the tools that are offered, and how they may be used.
        sampling: sampling parameters of the request.
        variables: further variables of the chat template.

    Raises:
        InvalidRequest: see `prompts.encode_chat`; a message of role `tool` does not match a call; a call is required
            together with another constraint, or with a schema that no grammar can express.
    """
    ids = encode_chat(model, messages, use, variables)
    form = model.answer_form
    is_open = opens_reasoning(form, ids, model.new_detokenizer(False, form.marks.by_token))
    sampling, split = answer_rules(form, use, sampling, is_open=is_open)
    return PreparedChat(ids, sampling, split)


def encode_chat(
    model: TextModel, messages: ChatMessages, use: ToolUse, variables: Mapping[str, object] | None = None
) -> list[int]:
    """Tokenize a conversation up to the start of the assistant's answer.

    Args:
        model: tokenizer and chat template.
        messages: messages of the conversation, oldest first.
        use: the tools that are offered.
        variables: further variables of the chat template.

    Raises:
        InvalidRequest: see `prompts.encode_chat`; a message of role `tool` does not match a call.
    """
    prompts.check_num_messages(len(messages))
    check_calls(messages)
    return prompts.encode_chat(model, with_names(messages), use.offered, variables)
