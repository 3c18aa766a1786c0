"""Creates a `TextModel` from an opened model: tokenizer, chat template and limits, without weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core.errors import UsageError
from kvferry.model.grammar.vocabulary import GrammarVocabulary
from kvferry.model.source import ModelSource, open_model
from kvferry.model.text.answers.answer import AnswerForm
from kvferry.model.text.answers.formats import AUTO, CallFormat, recognized
from kvferry.model.text.answers.marks import Marks
from kvferry.model.text.answers.reasoning import OPENER
from kvferry.model.text.chat_template import ChatTemplate
from kvferry.model.text.detokenizer import Detokenizer
from kvferry.model.text.stop_strings import StopMatcher
from kvferry.model.text.tokenizer import Tokenizer
from kvferry.model.text.tools.definitions import Tool
from kvferry.model.text.tools.prompt import encode_conversation
from kvferry.rpc.text.text_model import ChatMessages, TextModel


@dataclass(frozen=True, slots=True)
class AnswerParsers:
    """How answers are parsed: values of the settings `tool_call_parser` and `reasoning_parser`."""

    tool_calls: str = AUTO
    reasoning: str = AUTO


def text_model_of(source: ModelSource, parsers: AnswerParsers | None = None) -> TextModel:
    """Create a `TextModel` with the tokenizer, chat template and limits of `source`.

    Args:
        source: an open model.
        parsers: how answers are parsed; recognized from the model by default.

    Raises:
        UsageError: the chat template does not fit `parsers`.
    """
    template, tokenizer = source.chat_template, source.tokenizer

    def chat(messages: ChatMessages, tools: Sequence[Tool]) -> list[int]:
        assert template is not None
        return encode_conversation(template, tokenizer, messages, tools)

    return TextModel(
        name=source.config.name,
        digest=source.digest,
        max_model_tokens=source.config.max_model_tokens,
        vocab_size=source.config.vocab_size,
        eos_token_ids=source.config.eos_token_ids,
        tokenizer=tokenizer,
        new_detokenizer=lambda shows_control, marks: Detokenizer(tokenizer, shows_control=shows_control, marks=marks),
        new_stop_matcher=StopMatcher,
        max_prompt_chars=source.config.max_model_tokens * tokenizer.max_token_chars,
        encode_chat=None if template is None else chat,
        check_constraint=GrammarVocabulary(tokenizer).check,
        answer_form=_answer_form(template, tokenizer, parsers or AnswerParsers()),
        hidden_size=source.config.hidden_size,
    )


def open_text_model(spec: str, served_name: str = "", parsers: AnswerParsers | None = None) -> TextModel:
    """Open a model by name or path, without its weights; see `model.source.open_model`.

    Raises:
        UnknownModel: `spec` is neither a known name nor an existing path.
        ModelFileError: the files are missing, damaged or not supported.
        UsageError: the chat template does not fit `parsers`.
    """
    return text_model_of(open_model(spec, served_name=served_name), parsers)


def _answer_form(template: ChatTemplate | None, tokenizer: Tokenizer, parsers: AnswerParsers) -> AnswerForm:
    def has_token(text: str) -> bool:
        return tokenizer.token_id(text) is not None

    text = template.source if template is not None else ""
    call_format = recognized(text, has_token) if parsers.tool_calls == AUTO else CallFormat(parsers.tool_calls)
    if template is not None and not template.uses_tools:
        if parsers.tool_calls not in (AUTO, CallFormat.HERMES):
            raise UsageError(
                f"tool_call_parser {parsers.tool_calls!r} does not fit this model: its chat template has no tools, so "
                "that they are written in the format hermes; use auto",
                field="tool_call_parser",
            )
        call_format = CallFormat.HERMES
    has_reasoning = OPENER in text or has_token(OPENER) if parsers.reasoning == AUTO else parsers.reasoning == "think"
    control = {text: token.token_id for text, token in tokenizer.control_tokens.items()}
    return AnswerForm(call_format, has_reasoning, Marks.of(control))
