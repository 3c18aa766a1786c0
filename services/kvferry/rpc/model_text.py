"""The text side of an opened model, for whoever serves text over it."""

from kvferry.model.chat import encode_chat
from kvferry.model.detokenizer import Detokenizer
from kvferry.model.source import ModelSource
from kvferry.model.stop_strings import StopMatcher
from kvferry.rpc.text_model import ChatMessages, TextModel


def text_model_of(source: ModelSource) -> TextModel:
    """Tokenizer, chat template and limits of `source`."""
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
        new_detokenizer=lambda: Detokenizer(tokenizer),
        new_stop_matcher=StopMatcher,
        encode_chat=None if template is None else chat,
    )
