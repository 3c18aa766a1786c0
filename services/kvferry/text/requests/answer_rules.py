"""How the answer of a chat is constrained and split, which follows from the tools and the form of answers."""

from dataclasses import replace

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.core.inference.tools import Choice, ToolUse
from kvferry.core.sampling import SamplingParams
from kvferry.text.answers import reasoning
from kvferry.text.answers.answer import AnswerForm, SplitOptions
from kvferry.text.tools.grammars import calls_grammar, thought_rules


def answer_rules(
    form: AnswerForm, use: ToolUse, sampling: SamplingParams, *, is_open: bool
) -> tuple[SamplingParams, SplitOptions | None]:
    """Return the sampling parameters with the constraint of a required call, and the options for splitting the answer;
    `None` if it is not split.

    Args:
        form: format of the model's answers.
        use: the tools that are offered, and how they may be used.
        sampling: sampling parameters of the request.
        is_open: whether the prompt ends with the opening of the reasoning. A constraint then applies after its end.

    Raises:
        InvalidRequest: a call is required together with another constraint, or with a schema that no grammar can
            express.
    """
    names = tuple(tool.name for tool in use.callable_tools)
    is_required = use.choice is Choice.REQUIRED
    split = SplitOptions(names, use.max_calls, is_open, is_required) if names or form.has_reasoning else None
    constraint = sampling.constraint
    if is_required:
        sampling = replace(sampling, constraint=_required_call(form, use, sampling, is_open=is_open))
    elif constraint is not None and is_open and not constraint.after:
        sampling = replace(sampling, constraint=replace(constraint, after=reasoning.CLOSER))
    return sampling, split


def _required_call(form: AnswerForm, use: ToolUse, sampling: SamplingParams, *, is_open: bool) -> Constraint:
    if sampling.constraint is not None:
        raise InvalidRequest(
            "tool_choice requires a call, which constrains the output; remove the request's other constraint, such as "
            "response_format or structured_outputs, or use tool_choice auto",
            field="tool_choice",
        )
    thought = ""
    if form.has_reasoning:
        thought = thought_rules(form.marks, is_open=is_open, call_format=form.call_format)
    grammar = calls_grammar(
        form.call_format, use.callable_tools, form.marks, is_single=use.max_calls == 1, thought=thought
    )
    return Constraint(ConstraintKind.GRAMMAR, grammar)
