"""What text serving needs to know of a model: its limits, its tokenizer, its chat template. No weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

ChatMessages = Sequence[Mapping[str, str]]
"""Each with `role` and `content`."""


class Tokenizer(Protocol):
    """Text to token ids and back. Stateless; safe from several threads."""

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """`add_special`: put the begin-of-sequence token in front where the model wants one."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be half a character."""
        ...


class Detokenizer(Protocol):
    """Turns one sequence's tokens into text as they come, never half a character."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        ...

    def finish(self) -> str:
        """What is left when no more tokens come."""
        ...


class StopMatcher(Protocol):
    """Looks for stop strings across the pieces of one text, holding back what might become one."""

    @property
    def matched(self) -> str | None:
        """The stop string that was found; the text ends before it."""
        ...

    def feed(self, text: str) -> str:
        """Text that may be shown; nothing more after a match."""
        ...

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        ...


@dataclass(frozen=True, slots=True)
class TextModel:
    """One served model as text sees it."""

    name: str
    """What clients call it."""
    digest: str
    """Of the model's files, hexadecimal; empty when not known."""
    max_model_tokens: int
    """Context length: prompt and output together."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer
    new_detokenizer: Callable[[], Detokenizer]
    new_stop_matcher: Callable[[Sequence[str]], StopMatcher]
    encode_chat: Callable[[ChatMessages], list[int]] | None
    """Token ids of a conversation, ending where the assistant's answer begins; `None`: no chat template.
    Raises InvalidRequest for a conversation that the template refuses."""
