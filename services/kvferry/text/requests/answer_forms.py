"""The format of a model's answers: recognized from its chat template and tokens, or set by parsers."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core.errors import UsageError
from kvferry.text.answers import reasoning
from kvferry.text.answers.answer import AnswerForm
from kvferry.text.answers.marks import Marks
from kvferry.text.answers.registry import AUTO, CallFormat, recognized
from kvferry.text.requests.output_text import Detokenizer
from kvferry.text.templates.chat_template import ChatTemplate
from kvferry.text.tokenizing.tokenizer import Tokenizer

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
    return AnswerForm(call_format, has_reasoning, Marks.of(control))


def opens_reasoning(form: AnswerForm, token_ids: Sequence[int], detokenizer: Detokenizer) -> bool:
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
