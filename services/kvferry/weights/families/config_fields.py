"""Reads and checks the fields of a config.json, and refuses unread fields that affect the computation."""

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from kvferry.core.errors import ModelFileError

Json = Mapping[str, object]

_MIN_REAL, _MAX_REAL = 1e-20, 1e15
"""Range of numbers, whose products and quotients with others of a model are then float32 values."""
_MAX_NUMBERS = 4096
"""Maximum number of items in a list of numbers; lists have an item per layer or per rotary frequency."""
_SHOWN_CHARS = 60
LAYER_TYPES = ("full_attention", "sliding_attention")
_OTHER = "kvferry does not implement this feature; use another checkpoint of the model, or another model"

DECIDING: Mapping[str, tuple[object, ...]] = {
    "alibi": (False,),
    "attention_bias": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "attn_temperature_tuning": (False, 0),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "first_k_dense_replace": (0,),
    "hidden_act": ("silu",),
    "hidden_activation": ("silu",),
    "index_topk": (),
    "is_causal": (True,),
    "kv_lora_rank": (),
    "layer_types": (),
    "lm_head_bias": (False,),
    "logits_scaling": (1,),
    "mlp_bias": (False,),
    "moe_layer_freq": (1,),
    "n_group": (),
    "n_routed_experts": (0,),
    "n_shared_experts": (0,),
    "no_rope_layers": (),
    "num_experts": (0,),
    "num_kv_shared_layers": (0,),
    "num_local_experts": (0,),
    "parallel_attn": (False,),
    "q_lora_rank": (),
    "qk_layernorm": (False,),
    "quantization_config": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "rope_local_base_freq": (),
    "routed_scaling_factor": (1,),
    "scoring_func": ("softmax",),
    "sliding_window": (),
    "swiglu_alpha": (),
    "swiglu_limit": (),
    "topk_group": (),
    "topk_method": ("greedy",),
    "use_bidirectional_attention": (False,),
    "use_qk_norm": (False,),
    "use_qkv_bias": (False,),
    "use_sliding_window": (False,),
    "vision_config": (),
}
"""Fields that change the computation in some family, each with its harmless values; `null` is always harmless. A family
either reads such a field or declares that it ignores it, as `transformers` does; otherwise its value must be
harmless."""


class ConfigFields:
    """Fields of one object in a config.json, with the defaults of a family."""

    def __init__(self, raw: Json, where: Path | str, defaults: Json | None = None, *, prefix: str = "") -> None:
        """
        Args:
            raw: the object.
            where: the file, for messages.
            defaults: values of fields that are absent; a field that is `null` has no default.
            prefix: text before the names of fields in messages.
        """
        self.where = where
        self._raw = raw
        self._prefix = prefix
        self._defaults = defaults or {}
        self._read: set[str] = set()

    def value(self, key: str) -> object:
        """Return a field as it is; `None` if it is absent or `null`."""
        self._read.add(key)
        return self._raw.get(key, self._defaults.get(key))

    def stated(self, key: str) -> object:
        """Return a field as it is in the file, without the family's default; `None` if it is absent or `null`."""
        return self._raw.get(key)

    def ignore(self, *keys: str) -> None:
        """Declare that fields have no effect in this family."""
        self._read.update(keys)

    def refuse(self, key: str, remedy: str = _OTHER) -> NoReturn:
        """Refuse the value of a field.

        Raises:
            ModelFileError: always.
        """
        raise ModelFileError(
            f"{self.where}: {self._prefix}{key} = {repr(self.value(key))[:_SHOWN_CHARS]} is not supported: {remedy}"
        )

    def refuse_unread(self) -> None:
        """Check the fields in `DECIDING` that have not been read.

        Raises:
            ModelFileError: a value is not harmless.
        """
        for key, harmless in DECIDING.items():
            value = self._raw.get(key)
            if key in self._read or value is None or any(value is h or value == h for h in harmless):
                continue
            if key == "layer_types" and isinstance(value, list) and set(map(str, value)) <= {LAYER_TYPES[0]}:
                continue
            self.refuse(key)

    def whole(self, key: str, default: int | None = None) -> int:
        """Return a whole number from 1 to 2^31 - 1.

        Raises:
            ModelFileError: the field is not such a number, or is absent without a default.
        """
        value = self.value(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise ModelFileError(
                f"{self.where}: {self._prefix}{key} must be a positive whole number, not {repr(value)[:40]}"
            )
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """Return a positive number.

        Raises:
            ModelFileError: the field is not such a number, or is absent without a default.
        """
        value = self.value(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not _MIN_REAL < value < _MAX_REAL:
            raise ModelFileError(
                f"{self.where}: {self._prefix}{key} must be a positive number, not {repr(value)[:40]}; "
                f"values from {_MIN_REAL:g} to {_MAX_REAL:g} are supported"
            )
        return float(value)

    def optional_real(self, key: str) -> float | None:
        """Return a positive number; `None` if it is absent."""
        return None if self.value(key) is None else self.real(key)

    def optional_whole(self, key: str) -> int | None:
        """Return a positive whole number; `None` if it is absent."""
        return None if self.value(key) is None else self.whole(key)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a boolean.

        Raises:
            ModelFileError: the field is not a boolean.
        """
        value = self.value(key)
        if value is None and not (default and key in self._raw):  # transformers takes null as false
            return default
        if not isinstance(value, bool):
            raise ModelFileError(f"{self.where}: {self._prefix}{key} must be true or false, not {repr(value)[:40]}")
        return value

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return a list of `count` positive numbers.

        Raises:
            ModelFileError: the list has the wrong length or invalid items.
        """
        value = self.value(key)
        if not isinstance(value, list) or len(value) != count or count > _MAX_NUMBERS:
            found = f"{len(value)} items" if isinstance(value, list) else repr(value)[:40]
            raise ModelFileError(
                f"{self.where}: {self._prefix}{key} must be a list of {count} positive numbers, not {found}"
            )
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int | float) or not _MIN_REAL < item < _MAX_REAL:
                raise ModelFileError(
                    f"{self.where}: {self._prefix}{key} must contain positive numbers, not {repr(item)[:40]}"
                )
        return tuple(map(float, value))

    def inner(self, key: str) -> "ConfigFields | None":
        """Return the fields of an inner object; `None` if it is absent.

        Raises:
            ModelFileError: the field is not an object.
        """
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ModelFileError(f"{self.where}: {self._prefix}{key} must be an object, not {repr(value)[:40]}")
        return ConfigFields(value, self.where, prefix=f"{self._prefix}{key}.")

    def slides(self, num_layers: int) -> tuple[bool, ...] | None:
        """Return which layers have a sliding window, from `layer_types`; `None` if it is absent.

        Raises:
            ModelFileError: the field has the wrong length or unknown layer types.
        """
        value = self.value("layer_types")
        if value is None:
            return None
        if not isinstance(value, list) or not all(kind in LAYER_TYPES for kind in value):
            self.refuse("layer_types", f"known layer types are {', '.join(LAYER_TYPES)}")
        if len(value) != num_layers:
            raise ModelFileError(
                f"{self.where}: layer_types has {len(value)} items, but num_hidden_layers is {num_layers}"
            )
        return tuple(kind == LAYER_TYPES[1] for kind in value)

    def optional_token(self, key: str) -> int | None:
        """Return a token id; `None` if the field is absent or not a number."""
        value = self.value(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def tokens(self, key: str) -> set[int]:
        """Return token ids from a number or a list; an empty set if the field is absent.

        Raises:
            ModelFileError: an item is not a number.
        """
        items = listed(self.value(key))
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int):
                raise ModelFileError(
                    f"{self.where}: {self._prefix}{key} must be a token id or a list of token ids, not"
                    f" {repr(item)[:40]}"
                )
        return set(items)  # type: ignore[arg-type]


def listed(value: object) -> list[object]:
    """Convert a value to a list: a list is unchanged, `None` becomes empty, any other value becomes one item."""
    return value if isinstance(value, list) else [] if value is None else [value]
