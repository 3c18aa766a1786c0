"""The setting `speculation`: a method with parameters, such as `ngram?k=5` or `eagle=FOLDER?k=4`."""

from dataclasses import dataclass
from urllib.parse import parse_qsl

from kvferry.core.errors import UsageError
from kvferry.engine.schedule.speculation.trees.growing_tree import MAX_WIDTH

EXACT, REJECTION = "exact", "rejection"
OFF, AUTO, NGRAM, SUFFIX, DRAFT = "off", "auto", "ngram", "suffix", "draft"
EAGLE, MEDUSA = "eagle", "medusa"
MODEL_METHODS = (DRAFT, EAGLE, MEDUSA)
"""Methods that name a draft model or heads."""
_KNOWN = "off, auto, suffix, ngram?k=5, draft=MODEL, eagle=FOLDER or medusa=FOLDER"
MAX_DRAFT_TOKENS = 32
_DEFAULTS = {
    AUTO: {"k": 16},
    SUFFIX: {"k": 16},
    NGRAM: {"k": 5, "min": 2, "max": 5},
    OFF: {},
    DRAFT: {"k": 8, "fixed": 0},
    EAGLE: {"k": 6, "fixed": 0, "width": 1},
    MEDUSA: {"k": 4, "fixed": 0, "width": 1},
}


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Method of speculation and its parameters."""

    method: str
    """`off`, `auto`, `ngram`, `suffix`, `draft`, `eagle` or `medusa`."""
    num_drafts: int = 0
    """Maximum number of draft tokens of a sequence per step."""
    min_match: int = 2
    """Minimum length of a match in tokens."""
    max_match: int = 5
    """Maximum length of a match that `ngram` compares, in tokens."""
    draft_model: str = ""
    """With method `draft`, the name, folder or file of the draft model; with `eagle` and `medusa`, the folder of the
    heads."""
    is_fixed: bool = False
    """Whether the draft model, or the heads, always propose `num_drafts` tokens, which are all verified."""
    is_rejecting: bool = False
    """Whether the rejection rule accepts drafts of sampled requests (`run.rejection`), instead of accepting draft
    tokens that equal the drawn token."""
    width: int = 1
    """Maximum number of candidates of heads for a token; with more than 1, drafts are trees."""


def parse_speculation(text: str) -> SpeculationSettings:
    """Parse the setting: `off`, `auto`, `suffix`, `ngram`, `draft=MODEL`, `eagle=FOLDER` or `medusa=FOLDER`. All but
    `off` accept `?k=`, the maximum draft tokens of a sequence in a step. `ngram` also accepts `&min=` and `&max=`, the
    minimum and maximum match lengths. `draft`, `eagle` and `medusa` accept `&fixed=1`, which always proposes k tokens.
    `eagle` and `medusa` also accept `&width=`, the maximum candidates per token; above 1, drafts are trees of depth k.
    `accept=rejection` selects the rejection rule.

    Raises:
        UsageError: the method or a parameter is unknown, a value is missing or invalid, a parameter is repeated, or
            `min` is above `max`.
    """
    head, _, query = text.partition("?")
    method, equals, model = head.partition("=")
    if method not in _DEFAULTS or bool(equals) != (method in MODEL_METHODS):
        raise UsageError(f"speculation {text[:80]!r} is not valid; expected {_KNOWN}", field="speculation")
    if method in MODEL_METHODS and not model:
        what = (
            "MODEL, where MODEL is a name, .gguf file or folder"
            if method == DRAFT
            else "FOLDER, where FOLDER contains the head's files"
        )
        raise UsageError(f"speculation {method!r} needs a value: {method}={what}", field="speculation")
    values, accept = dict(_DEFAULTS[method]), EXACT
    parameters = parse_qsl(query, keep_blank_values=True)
    if len(dict(parameters)) < len(parameters):
        raise UsageError(f"speculation {text[:80]!r} has a parameter twice; keep one of them", field="speculation")
    for key, value in parameters:
        if key == "accept" and method != OFF:
            if value not in (EXACT, REJECTION):
                raise UsageError(
                    f"parameter accept={value[:20]!r} of speculation {method!r} must be {EXACT} or {REJECTION}",
                    field="speculation",
                )
            accept = value
            continue
        if key not in values:
            known = ", ".join((*values, "accept")) if values else "none"
            raise UsageError(
                f"unknown parameter {key[:20]!r} of speculation {method!r}; known: {known}", field="speculation"
            )
        low, high = {"fixed": (0, 1), "width": (1, MAX_WIDTH)}.get(key, (1, MAX_DRAFT_TOKENS))
        if not (value.isascii() and value.isdigit() and len(value) < 4 and low <= int(value) <= high):
            raise UsageError(
                f"parameter {key}={value[:20]!r} of speculation {method!r} must be a whole number from {low} to {high}",
                field="speculation",
            )
        values[key] = int(value)
    shortest, longest = values.get("min", 2), values.get("max", 5)
    if shortest > longest:
        raise UsageError(f"min={shortest} of speculation {method!r} is above max={longest}", field="speculation")
    is_fixed = values.get("fixed", 0) == 1
    return SpeculationSettings(
        method,
        values.get("k", 0),
        shortest,
        longest,
        model,
        is_fixed,
        is_rejecting=accept == REJECTION,
        width=values.get("width", 1),
    )


def checked_speculation(text: str) -> str:
    """Check the setting and return it.

    Raises:
        ValueError: the method or a parameter is unknown or out of range.
    """
    try:
        parse_speculation(text)
    except UsageError as error:
        raise ValueError(str(error)) from error
    return text
