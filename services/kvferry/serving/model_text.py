"""Creates a `TextModel` from an opened model: tokenizer, chat template and limits, without weights."""

from collections.abc import Mapping, Sequence

from kvferry.core.inference.tools import Tool
from kvferry.model.source import ModelSource, open_model
from kvferry.serving.text_model import ChatMessages, TextModel
from kvferry.text.grammar.compiler import CHECK_STACK_BYTES, GrammarCompiler
from kvferry.text.requests.answer_rules import AnswerParsers, answer_form
from kvferry.text.requests.stop_strings import StopMatcher
from kvferry.text.tokenizing.tokenizer import Detokenizer
from kvferry.text.tools.conversations import PromptEnd, encode_conversation


def text_model_of(source: ModelSource, parsers: AnswerParsers | None = None) -> TextModel:
    """Create a `TextModel` with the tokenizer, chat template and limits of `source`.

    Args:
        source: an open model.
        parsers: how answers are parsed; recognized from the model by default.

    Raises:
        UsageError: the chat template does not fit `parsers`.
    """
    template, tokenizer = source.chat_template, source.tokenizer

    def chat(
        messages: ChatMessages, tools: Sequence[Tool], variables: Mapping[str, object], end: PromptEnd
    ) -> list[int]:
        assert template is not None
        return encode_conversation(template, tokenizer, messages, tools, variables, end)

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
        check_constraint=GrammarCompiler(tokenizer, stack_bytes=CHECK_STACK_BYTES).check,
        answer_form=answer_form(template, tokenizer, parsers or AnswerParsers()),
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
