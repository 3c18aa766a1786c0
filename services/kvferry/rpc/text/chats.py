"""Prepares a chat for generation: prompt, options for splitting the answer, and the grammar if a call is required."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.core.sampling import SamplingParams
from kvferry.model.requests.answer_forms import opens_reasoning
from kvferry.model.text.answers import reasoning
from kvferry.model.text.answers.answer import SplitOptions
from kvferry.model.text.tools.definitions import Choice, ToolUse
from kvferry.model.text.tools.grammars import calls_grammar, thought_rules
from kvferry.model.text.tools.history import check_calls, with_names
from kvferry.rpc.text import prompts
from kvferry.rpc.text.text_model import ChatMessages, TextModel


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
    names = tuple(tool.name for tool in use.callable_tools)
    is_required = use.choice is Choice.REQUIRED
    split = SplitOptions(names, use.max_calls, is_open, is_required) if names or form.has_reasoning else None
    constraint = sampling.constraint
    if is_required:
        sampling = replace(sampling, constraint=_constraint(model, use, sampling, is_open=is_open))
    elif constraint is not None and is_open and not constraint.after:
        sampling = replace(sampling, constraint=replace(constraint, after=reasoning.CLOSER))
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


def _constraint(model: TextModel, use: ToolUse, sampling: SamplingParams, *, is_open: bool) -> Constraint:
    if sampling.constraint is not None:
        raise InvalidRequest(
            "tool_choice requires a call, which constrains the output; remove the request's other constraint, such as "
            "response_format or structured_outputs, or use tool_choice auto",
            field="tool_choice",
        )
    form = model.answer_form
    thought = ""
    if form.has_reasoning:
        thought = thought_rules(form.marks, is_open=is_open, call_format=form.call_format)
    grammar = calls_grammar(
        form.call_format, use.callable_tools, form.marks, is_single=use.max_calls == 1, thought=thought
    )
    return Constraint(ConstraintKind.GRAMMAR, grammar)
