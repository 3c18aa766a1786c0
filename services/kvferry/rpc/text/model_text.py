"""Creates a `TextModel` from an opened model: tokenizer, chat template and limits, without weights."""

from kvferry.model.grammar.vocabulary import GrammarVocabulary
from kvferry.model.source import ModelSource, open_model
from kvferry.model.text.chat import encode_chat
from kvferry.model.text.detokenizer import Detokenizer
from kvferry.model.text.stop_strings import StopMatcher
from kvferry.rpc.text.text_model import ChatMessages, TextModel


def text_model_of(source: ModelSource) -> TextModel:
    """Create a `TextModel` with the tokenizer, chat template and limits of `source`."""
    template, tokenizer = source.chat_template, source.tokenizer

    def chat(messages: ChatMessages) -> list[int]:
        assert template is not None
        return encode_chat(template, tokenizer, list(messages))

    return TextModel(
        name=source.config.name,
        digest=source.digest,
        max_model_tokens=source.config.max_model_tokens,
        vocab_size=source.config.vocab_size,
        eos_token_ids=source.config.eos_token_ids,
        tokenizer=tokenizer,
        new_detokenizer=lambda shows_control: Detokenizer(tokenizer, shows_control=shows_control),
        new_stop_matcher=StopMatcher,
        max_prompt_chars=source.config.max_model_tokens * tokenizer.max_token_chars,
        encode_chat=None if template is None else chat,
        check_constraint=GrammarVocabulary(tokenizer).check,
    )


def open_text_model(spec: str, served_name: str = "") -> TextModel:
    """Open a model by name or path, without its weights; see `model.source.open_model`.

    Raises:
        UnknownModel: `spec` is neither a known name nor an existing path.
        ModelFileError: the files are missing, damaged or not supported.
    """
    return text_model_of(open_model(spec, served_name=served_name))
