"""The text part of a model for text and images: its object in config.json, and the names of its tensors.

transformers has written two generations of names: `language_model.model.*` beside `vision_tower.*`, and
`model.language_model.*` beside `model.vision_tower.*`; Qwen's first generation has `model.*` beside `visual.*`.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvferry.core.errors import ModelFileError
from kvferry.weights.families.config_fields import ConfigFields, Json, listed

_FIELD = "text_config"
_TIED, _ENDS, _BEGIN, _KIND = "tie_word_embeddings", "eos_token_id", "bos_token_id", "model_type"
_ROPES = ("rope_parameters", "rope_scaling")
_SECTIONED = "mrope"
RENAMES = (
    (re.compile(r"^language_model\.(model\.|lm_head\.)"), r"\1"),
    (re.compile(r"^model\.language_model\."), "model."),
)
"""Prefixes of the text part's tensors, and the prefixes that text-only models use instead."""
_LEFT_OUT = re.compile(r"^(?:model\.)?(vision_tower|multi_modal_projector|visual)\.")


@dataclass(frozen=True, slots=True)
class TextConfigForm:
    """Form of the text part in a class for text and images: model types, location of its fields, rotary embedding."""

    kinds: tuple[str, ...]
    """Values of `model_type` in `text_config` that are the family's text model; the field may be absent."""
    may_be_flat: bool = False
    """Whether the fields of the text part may be beside `vision_config` instead of in `text_config`."""
    has_sections: bool = False
    """Whether the rotary embedding has sections of three positions (M-RoPE: Wang et al., Qwen2-VL, 2024, section 2.1).
    The three positions of a text token are equal, so the result is the plain rotary embedding."""


def left_out(name: str) -> str | None:
    """Return the part to which a tensor of the files belongs if that part is not served, such as `vision_tower`."""
    found = _LEFT_OUT.match(name)
    return None if found is None else found[1]


def text_fields(raw: Json, part: TextConfigForm, where: Path, *, has_head: bool) -> tuple[Json, str]:
    """Return the fields of the text part, as in the config.json of a text-only model, and their location.

    The end tokens of both objects apply. The output head is tied to the embedding if the files have no head, unless
    `tie_word_embeddings` is false: transformers ignores a true value if the files have a head.

    Args:
        raw: content of config.json.
        part: the family's text part.
        where: the file, for messages.
        has_head: whether the files have an output head.

    Raises:
        ModelFileError: `text_config` is missing, not an object, or belongs to another text model.
    """
    outer = ConfigFields(raw, where)
    inner, place = raw.get(_FIELD), f"{where}: {_FIELD}"
    if outer.inner(_FIELD) is None:
        if not part.may_be_flat:
            raise ModelFileError(f"{where}: {_FIELD} is missing; download the folder again")
        inner, place = {key: value for key, value in raw.items() if key not in ("vision_config", _KIND)}, str(where)
    assert isinstance(inner, dict), "checked by ConfigFields.inner"
    text: dict[str, object] = dict(inner)
    if outer.value("is_causal") not in (None, True):
        outer.refuse("is_causal")
    kind = text.get(_KIND)
    if kind is not None and kind not in part.kinds:
        ConfigFields(text, place).refuse(_KIND, f"the text part must be {' or '.join(part.kinds)}")
    stated = raw.get(_TIED) if raw.get(_TIED) is not None else text.get(_TIED)
    text[_TIED] = not has_head if stated in (None, True) else stated
    ends = [*listed(raw.get(_ENDS)), *listed(text.get(_ENDS))]
    if ends:
        text[_ENDS] = ends
    if text.get(_BEGIN) is None and raw.get(_BEGIN) is not None:
        text[_BEGIN] = raw[_BEGIN]
    if part.has_sections:
        text |= {key: _as_plain(text[key]) for key in _ROPES if key in text}
    return MappingProxyType(text), place


def _as_plain(rope: object) -> object:
    """Return a rotary embedding of a type with sections as a plain one."""
    if not isinstance(rope, dict) or _SECTIONED not in (rope.get("rope_type"), rope.get("type")):
        return rope
    return {key: value for key, value in rope.items() if key != "type"} | {"rope_type": "default"}
