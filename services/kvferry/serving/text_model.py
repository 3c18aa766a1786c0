"""The parts of a model that text serving needs: limits, tokenizer and chat template, without weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.core.constraint import Constraint
from kvferry.core.inference.tools import Tool
from kvferry.text.answers.answer import AnswerForm
from kvferry.text.requests.output_text import StopFinder, TextDecoder
from kvferry.text.tools.conversations import PromptEnd

ChatMessages = Sequence[Mapping[str, object]]
"""A conversation in the form that chat templates expect: messages with `role` and `content`; assistant messages may
have `tool_calls`, and messages of role `tool` have `tool_call_id`."""


class TextCodec(Protocol):
    """Converts between text and token ids. Stateless and thread-safe."""

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Convert text to token ids.

        Args:
            text: the text.
            add_special: whether to prepend the beginning-of-sequence token, if the model uses one.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Convert a complete sequence of token ids to text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may be an incomplete UTF-8 sequence."""
        ...


@dataclass(frozen=True, slots=True)
class TextModel:
    """The served model's names, limits, tokenizer and chat template."""

    name: str
    """Model name for clients."""
    digest: str
    """Digest of the model's files, hexadecimal; empty if unknown."""
    max_model_tokens: int
    """Context length in tokens, prompt and output."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: TextCodec
    new_detokenizer: Callable[[bool, Mapping[int, str]], TextDecoder]
    """Function that creates a detokenizer. Its arguments are whether control tokens are shown, and the strings that
    stand for an answer's markers, by token id."""
    new_stop_matcher: Callable[[Sequence[str]], StopFinder]
    max_prompt_chars: int
    """Maximum number of characters that `max_model_tokens` tokens can encode."""
    encode_chat: Callable[[ChatMessages, Sequence[Tool], Mapping[str, object], PromptEnd], list[int]] | None
    """Function that tokenizes a conversation, with the tools that may be called, further variables of the template, and
    how the prompt ends; `None` if the model has no chat template. Raises InvalidRequest for a
    conversation that the template rejects."""
    check_constraint: Callable[[Constraint], int]
    """Function that compiles a constraint for the model's vocabulary, and returns its memory in bytes. Raises
    InvalidRequest for a constraint that workers cannot compile. A hostile constraint may take minutes to compile; use
    `constraint_check`."""
    answer_form: AnswerForm = field(default_factory=AnswerForm)
    """How reasoning and tool calls are written in the model's answers."""
    is_off_loop: bool = False
    """Whether jobs with this model run outside of an event loop, in the text process or on a thread, so that a costly
    preparation does not block other requests."""
    hidden_size: int = 0
    """Number of values of a pooled vector; 0 if vectors are not served."""
