"""The form of a model's answers, and how the answer of a chat is constrained and split.

The form is recognized from the chat template and the tokens, or set by parsers. The constraint and the splitting follow
from the form and from the tools of the request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import UsageError
from kvferry.core.inference.tools import ToolMode, ToolUse
from kvferry.core.sampling import SamplingParams
from kvferry.text.answers import reasoning
from kvferry.text.answers.answer import AnswerForm, SplitOptions
from kvferry.text.answers.marks import Marks
from kvferry.text.answers.registry import AUTO, CallFormat, recognized
from kvferry.text.requests.output_text import TextDecoder
from kvferry.text.templates.chat_template import ChatTemplate
from kvferry.text.tokenizing.tokenizer import Tokenizer
from kvferry.text.tools.grammars import answer_frame, calls_grammar, check_budget, free_answer, thought_rules

TAIL_TOKENS = 32
"""Number of tokens at the end of a prompt that are searched for the start of the reasoning."""


@dataclass(frozen=True, slots=True)
class AnswerParsers:
    """Parsers of answers: values of the settings `tool_call_parser` and `reasoning_parser`."""

    tool_calls: str = AUTO
    reasoning: str = AUTO


def answer_form(template: ChatTemplate | None, tokenizer: Tokenizer, parsers: AnswerParsers) -> AnswerForm:
    """Return the format of a model's answers.

    Args:
        template: the chat template; `None` if the model has none.
        tokenizer: the model's tokenizer.
        parsers: the settings of the answer parsers.

    Raises:
        UsageError: the chat template does not fit `parsers`.
    """

    def has_token(text: str) -> bool:
        return tokenizer.token_id(text) is not None

    text = template.source if template is not None else ""
    call_format = recognized(text, has_token) if parsers.tool_calls == AUTO else CallFormat(parsers.tool_calls)
    if template is not None and not template.uses_tools:
        if parsers.tool_calls not in (AUTO, CallFormat.HERMES):
            raise UsageError(
                f"tool_call_parser {parsers.tool_calls!r} does not fit this model: its chat template does not support "
                "tools, so the hermes format is used; use auto",
                field="tool_call_parser",
            )
        call_format = CallFormat.HERMES
    opener = reasoning.OPENER
    has_reasoning = opener in text or has_token(opener) if parsers.reasoning == AUTO else parsers.reasoning == "think"
    if call_format is CallFormat.HARMONY:  # reasoning is a channel of this format
        has_reasoning = parsers.reasoning != "off"
    control = {text: token.token_id for text, token in tokenizer.control_tokens.items()}
    return AnswerForm(call_format, has_reasoning, Marks.of(control, tokenizer.added_tokens))


def opens_reasoning(form: AnswerForm, token_ids: Sequence[int], detokenizer: TextDecoder) -> bool:
    """Return whether a prompt ends with the opening of the reasoning.

    Args:
        form: format of the model's answers.
        token_ids: the prompt.
        detokenizer: a new detokenizer, which writes the marks of answers.
    """
    if not form.has_reasoning:
        return False
    tail = detokenizer.feed(token_ids[-TAIL_TOKENS:]) + detokenizer.finish()
    return tail.rstrip().endswith(form.marks.written(reasoning.OPENER))


def answer_rules(
    form: AnswerForm,
    use: ToolUse,
    sampling: SamplingParams,
    *,
    is_open: bool,
    max_reasoning_tokens: int | None = None,
) -> tuple[SamplingParams, SplitOptions | None]:
    """Return the sampling parameters with the constraint of the whole answer, and the options for splitting the answer;
    `None` if it is not split.

    An answer is reasoning, if the model has any, and then calls, text, or the text of the request's constraint. If a
    call is required, the constraint holds for the answer to the results. If calls are possible, the answer has either
    calls or the constrained text.

    Args:
        form: format of the model's answers.
        use: the tools that are offered, and how they may be used.
        sampling: sampling parameters of the request.
        is_open: whether the prompt ends with the opening of the reasoning.
        max_reasoning_tokens: maximum number of tokens of the reasoning, which then ends; `None` for no limit. Without
            effect for a model without reasoning.

    Raises:
        InvalidRequest: calls are required, or possible beside a constraint, and a tool has a schema that no grammar can
            express; or the length of this model's reasoning cannot be limited.
    """
    names = tuple(tool.name for tool in use.callable_tools)
    is_required = use.choice is ToolMode.REQUIRED
    split = None
    if names or form.has_reasoning:
        schemas = {tool.name: tool.schema for tool in use.callable_tools}
        split = SplitOptions(names, use.max_calls, is_open, is_required, schemas=schemas)
    constraint = sampling.constraint
    thought = ""
    has_budget = form.has_reasoning and max_reasoning_tokens is not None
    if has_budget:
        check_budget(form.call_format, form.marks, is_open=is_open)
    if form.has_reasoning:
        thought = thought_rules(
            form.marks, is_open=is_open, call_format=form.call_format, max_tokens=max_reasoning_tokens
        )
    is_single = use.max_calls == 1
    if is_required:
        grammar = calls_grammar(form.call_format, use.callable_tools, form.marks, is_single=is_single, thought=thought)
        sampling = replace(sampling, constraint=Constraint(ConstraintKind.GRAMMAR, grammar))
    elif constraint is not None and not (constraint.after or constraint.frame) and (thought or names):
        frame = answer_frame(form.call_format, use.callable_tools, form.marks, is_single=is_single, thought=thought)
        sampling = replace(sampling, constraint=replace(constraint, frame=frame))
    elif has_budget:
        grammar = free_answer(form.call_format, form.marks, thought=thought, is_open=is_open)
        sampling = replace(sampling, constraint=Constraint(ConstraintKind.GRAMMAR, grammar))
    return sampling, split
