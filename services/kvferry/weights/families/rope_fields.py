"""Reads the rotary embedding from a config.json: base, scaling, and the part of a head that is rotated.

transformers 5 stores all of it in `rope_parameters`; earlier versions have `rope_theta`, `rope_scaling` and
`partial_rotary_factor`. Values that are absent are computed as in transformers (`modeling_rope_utils`).
"""

import math
from dataclasses import dataclass

from kvferry.core.errors import ModelFileError
from kvferry.weights.families.config_fields import LAYER_TYPES, ConfigFields
from kvferry.weights.rope import DynamicNtkRope, LinearRope, Llama3RopeScaling, LongRope, RopeScaling, YarnRope

ORIGINAL = "original_max_position_embeddings"
KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding of a model, as configured."""

    theta: float
    scaling: RopeScaling | None
    rotary_dim: int
    """Number of rotated values per head."""
    context_tokens: int
    """Context length in tokens, after scaling."""


def read_rope(fields: ConfigFields, head_dim: int, *, default_theta: float, inner: str | None = None) -> Rope:
    """Read the rotary embedding.

    Args:
        fields: fields of the model.
        head_dim: values per head.
        default_theta: base if the file has none.
        inner: name of the object in `rope_parameters`, if the family has one for each layer type.

    Raises:
        ModelFileError: the kind is unknown, a value is missing or out of range, or two objects differ.
    """
    given = _given(fields, inner)
    theta = given.real("rope_theta", fields.real("rope_theta", default_theta))
    share = given.real("partial_rotary_factor", fields.real("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ModelFileError(
            f"{fields.where}: partial_rotary_factor {share:g} rotates {rotary_dim} of {head_dim} values of a head; it "
            f"must rotate an even number of values, at most {head_dim}"
        )
    context_tokens = fields.whole("max_position_embeddings")
    kind = given.value("rope_type") or given.value("type") or "default"
    if kind in ("su", "yarn") and given.value("short_factor") is not None:
        kind = "longrope"  # earlier names, in Phi-3
    if kind == "default":
        return Rope(theta, None, rotary_dim, context_tokens)
    scaling: RopeScaling
    if kind == "linear":
        scaling = LinearRope(given.real("factor"))
    elif kind == "dynamic":
        if rotary_dim <= 2:
            given.refuse("rope_type", "a head needs more than two rotated values")
        scaling = DynamicNtkRope(given.real("factor"), context_tokens)
        context_tokens = int(context_tokens * max(scaling.factor, 1.0))
    elif kind == "yarn":
        if theta <= 1:
            given.refuse("rope_type", f"its rope_theta must be larger than 1, not {theta:g}")
        scaling = _yarn(given, _original(fields, given, context_tokens), context_tokens)
        context_tokens = max(context_tokens, int(scaling.original_max_position * scaling.factor))
    elif kind == "longrope":
        scaling = _long(given, _original(fields, given, context_tokens), context_tokens, rotary_dim // 2)
    elif kind == "llama3":
        low, high = given.real("low_freq_factor"), given.real("high_freq_factor")
        if high <= low:
            given.refuse("high_freq_factor", f"it must be larger than low_freq_factor, {low:g}")
        scaling = Llama3RopeScaling(
            factor=given.real("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position=_original(fields, given, None),
        )
    else:
        raise ModelFileError(
            f"{fields.where}: rope_scaling type {repr(kind)[:40]} is not supported; use one of {', '.join(KINDS)}"
        )
    return Rope(theta, scaling, rotary_dim, context_tokens)


def _given(fields: ConfigFields, inner: str | None) -> ConfigFields:
    """Return the object with the parameters."""
    both = [fields.stated(key) for key in ("rope_parameters", "rope_scaling")]
    if None not in both and both[0] != both[1]:
        fields.refuse("rope_scaling", "it differs from rope_parameters; remove the one that does not apply")
    found = fields.inner("rope_parameters") or fields.inner("rope_scaling") or ConfigFields({}, fields.where)
    if inner is None:
        for kind in LAYER_TYPES:
            if found.value(kind) is not None:
                found.refuse(kind, "this class has one rotary embedding for all layers; state it without layer types")
        return found
    if fields.stated("rope_parameters") and found.value(inner) is None:
        fields.refuse("rope_parameters", f"this class has an object for each layer type; add {inner}")
    return found.inner(inner) or found


def _original(fields: ConfigFields, given: ConfigFields, context_tokens: int | None) -> int:
    """Return the length before scaling; Phi-3 stores it beside `rope_scaling`, where it takes precedence."""
    beside = fields.optional_whole(ORIGINAL)
    return given.whole(ORIGINAL, context_tokens) if beside is None else beside


def _yarn(given: ConfigFields, original: int, context_tokens: int) -> YarnRope:
    factor = given.real("factor", context_tokens / original)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    over, under = given.value("mscale"), given.value("mscale_all_dim")
    computed = magnitude(given.real("mscale")) / magnitude(given.real("mscale_all_dim")) if over and under else None
    return YarnRope(
        factor=factor,
        original_max_position=original,
        attention_factor=given.real("attention_factor", magnitude(1.0) if computed is None else computed),
        beta_fast=given.real("beta_fast", 32.0),
        beta_slow=given.real("beta_slow", 1.0),
        truncate=given.flag("truncate", default=True),
    )


def _long(given: ConfigFields, original: int, context_tokens: int, count: int) -> LongRope:
    factor = given.real("factor", context_tokens / original)
    default = math.sqrt(1 + math.log(factor) / math.log(max(original, 2))) if factor > 1 else 1.0
    return LongRope(
        short_factors=given.numbers("short_factor", count),
        long_factors=given.numbers("long_factor", count),
        original_max_position=original,
        attention_factor=given.real("attention_factor", default),
    )
