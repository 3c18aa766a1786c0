"""The supported formats of tool calls, and recognition of a model's format."""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from kvferry.text.answers import gemma_calls, harmony, json_calls, pythonic, xml_calls
from kvferry.text.answers.call_parser import CallSyntax
from kvferry.text.answers.marks import Marks


class CallFormat(StrEnum):
    """A format of tool calls. The values are those of the setting `tool_call_parser`."""

    DEEPSEEK_V3 = "deepseek-v3"
    DEEPSEEK_V31 = "deepseek-v3.1"
    FUNCTIONGEMMA = "functiongemma"
    GRANITE = "granite"
    HERMES = "hermes"
    HARMONY = "harmony"
    LLAMA3_JSON = "llama3-json"
    MISTRAL = "mistral"
    OLMO3 = "olmo3"
    PHI4 = "phi4"
    PYTHONIC = "pythonic"
    QWEN3_CODER = "qwen3-coder"


AUTO = "auto"
CALL_PARSERS = (AUTO, *CallFormat)
"""Values of the setting `tool_call_parser`."""
REASONING_PARSERS = (AUTO, "think", "off")
"""Values of the setting `reasoning_parser`."""

_SYNTAXES: Mapping[CallFormat, Callable[[Marks], CallSyntax]] = {
    CallFormat.DEEPSEEK_V3: json_calls.DeepSeek,
    CallFormat.DEEPSEEK_V31: json_calls.DeepSeek,
    CallFormat.FUNCTIONGEMMA: gemma_calls.FunctionGemma,
    CallFormat.GRANITE: json_calls.Granite,
    CallFormat.HERMES: json_calls.Hermes,
    CallFormat.LLAMA3_JSON: json_calls.Llama3Json,
    CallFormat.MISTRAL: json_calls.Mistral,
    CallFormat.OLMO3: pythonic.Olmo3,
    CallFormat.PHI4: json_calls.Phi4,
    CallFormat.PYTHONIC: pythonic.Pythonic,
    CallFormat.QWEN3_CODER: xml_calls.Qwen3Coder,
}
_SIGNS: Sequence[tuple[CallFormat, tuple[str, ...]]] = (
    (CallFormat.QWEN3_CODER, (json_calls.OPENER, xml_calls.PARAMETER)),
    (CallFormat.HERMES, (json_calls.OPENER,)),
    (CallFormat.MISTRAL, (json_calls.MISTRAL_TAG,)),
    (CallFormat.PYTHONIC, ("[func_name1(",)),
    (CallFormat.LLAMA3_JSON, (json_calls.LLAMA3_TAG,)),
    (CallFormat.HARMONY, (harmony.CHANNEL,)),
    (CallFormat.DEEPSEEK_V3, (json_calls.SEPARATOR, json_calls.FENCE)),
    (CallFormat.DEEPSEEK_V31, (json_calls.SEPARATOR,)),
    (CallFormat.PHI4, (json_calls.LIST_CLOSER,)),
    (CallFormat.GRANITE, (json_calls.LIST_OPENER,)),
    (CallFormat.OLMO3, (pythonic.OLMO3_OPENER,)),
    (CallFormat.FUNCTIONGEMMA, (gemma_calls.OPENER,)),
)
"""Strings in a template, or tokens of a vocabulary, by which a format is recognized if all of them are there; the first
match decides. The string of the pythonic format is in the instructions for calls in Llama 3.2's and Llama 4's
templates."""


def recognized(template: str, has_token: Callable[[str], bool]) -> CallFormat:
    """Return a model's format: recognized by its chat template, or else by its vocabulary, or else Hermes.

    Args:
        template: source of the chat template.
        has_token: function that returns whether a string is a single token of the vocabulary.
    """
    for known, signs in _SIGNS:
        if all(sign in template for sign in signs):
            return known
    return next((known for known, signs in _SIGNS if all(map(has_token, signs))), CallFormat.HERMES)


def syntax_of(call_format: CallFormat, marks: Marks) -> CallSyntax:
    """Return the reader of a format, for a model with these marks.

    Args:
        call_format: the format; not Harmony, whose calls are messages.
        marks: marks of the model's markers.
    """
    return _SYNTAXES[call_format](marks)


def new_id_of(call_format: CallFormat, letters: Callable[[int], str]) -> Callable[[], str]:
    """Return a function that generates ids of calls.

    Mistral's templates require 9 letters and digits; all other formats get ids in OpenAI's form.

    Args:
        call_format: the model's format.
        letters: function that returns this number of random letters and digits.
    """
    if call_format is CallFormat.MISTRAL:
        return lambda: letters(9)
    return lambda: f"call_{letters(24)}"
