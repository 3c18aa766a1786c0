"""Markers of an answer's parts. A marker that is a control token of the model is one character, a *mark*.

Detokenizers omit control tokens, and text that merely spells one (`[TOOL_CALLS]`, because a user asked for it) is not
the token. Therefore the detokenizer of an answer writes each control token that is a marker as a mark: an unpaired
surrogate, which no decoded text contains. Parsers compare marks like any other text, and remove the marks that they do
not need.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

_FIRST_MARK = 0xD800
_LAST_MARK = 0xDFFF
MARKERS = (
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
    "<think>",
    "</think>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<function_calls>",
    "</function_calls>",
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
)
"""Markers of known formats."""
HARMONY = ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>")
"""Markers of the harmony format; the last three end messages."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of a model's markers."""

    by_token: Mapping[int, str] = field(default_factory=dict)
    """Mark by the id of a control token."""
    by_text: Mapping[str, str] = field(default_factory=dict)
    """Mark by the text of a control token."""
    token_ids: Mapping[str, int] = field(default_factory=dict)
    """Id by text of each marker that is a token; grammars refer to it by its id."""

    @classmethod
    def of(cls, control_tokens: Mapping[str, int], added_tokens: Mapping[str, int] | None = None) -> "Marks":
        """Return the marks of the markers that are control tokens.

        Args:
            control_tokens: ids of all control tokens by text.
            added_tokens: ids of all added tokens by text. A marker that is a token without the flag `special` is text
                in the answer, and has no mark.
        """
        # Other models have control tokens with the same text as some of harmony's markers.
        tokens = {**(added_tokens or {}), **control_tokens}
        known = (*MARKERS, *HARMONY) if HARMONY[0] in tokens else MARKERS
        by_text = {text: chr(_FIRST_MARK + n) for n, text in enumerate(t for t in known if t in control_tokens)}
        return cls(
            {control_tokens[text]: mark for text, mark in by_text.items()},
            by_text,
            {text: tokens[text] for text in known if text in tokens},
        )

    def written(self, marker: str) -> str:
        """Return how `marker` is written in the text of an answer: as its mark, or as its text if it is not a control
        token."""
        return self.by_text.get(marker, marker)


def is_mark(character: str) -> bool:
    """Return whether a character of an answer stands for a control token."""
    return _FIRST_MARK <= ord(character) <= _LAST_MARK


def without_marks(text: str) -> str:
    """Return `text` without its marks: control tokens are not part of the content."""
    return text if text.isascii() or not any(map(is_mark, text)) else "".join(c for c in text if not is_mark(c))
