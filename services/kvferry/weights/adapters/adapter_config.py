"""Reads adapter_config.json of a PEFT folder: rank, alpha and their patterns; refuses adapters other than plain LoRA.

    y = W x + scale B A x        scale = alpha / rank, or alpha / sqrt(rank) with rsLoRA

(Hu et al., LoRA, 2021, section 4.1; Kalajdzievski, A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA, 2023)
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvferry.core.errors import ModelFileError
from kvferry.weights.families.config_fields import Json

MAX_RANK = 256
"""Largest rank of an adapter."""
_MAX_PATTERNS = 4096
_MODULE = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
"""A key of a pattern: the end of a module's name. PEFT also accepts regular expressions, whose matching time is not
bounded."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Initializations that change the weights of the base model; an adapter's tensors alone then do not suffice."""
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "inference_mode",
        "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config",
        "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules",
        "task_type",
    }
)  # fmt: skip
"""Fields that describe how the adapter was trained and do not change its computation. The tensors show which modules it
updates."""
_REFUSED = {
    "use_dora": "DoRA is not supported; train with use_dora=False, or merge the adapter into the model",
    "modules_to_save": "replacing whole modules is not supported; train without modules_to_save",
    "trainable_token_indices": "replacing embedding rows is not supported; train linear layers only",
    "lora_bias": "LoRA biases are not supported; train with lora_bias=False",
    "fan_in_fan_out": "transposed weights are not supported; convert the adapter to weights of shape [out, in]",
    "layer_replication": "replicated layers are not supported; merge the adapter and serve the result as a model",
    "target_parameters": "only linear layers are supported; train with target_modules",
    "use_qalora": "QA-LoRA is not supported; train with use_qalora=False",
    "alora_invocation_tokens": "activated LoRA is not supported; train without alora_invocation_tokens",
}


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Ranks and scales of the updates of an adapter."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    """Whether alpha is divided by the square root of the rank (rsLoRA) instead of by the rank."""
    ranks: Mapping[str, int]
    """Other ranks, by the end of a module's name."""
    alphas: Mapping[str, float]
    """Other values of alpha, by the end of a module's name."""

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's update."""
        return next((rank for end, rank in self.ranks.items() if _ends(module, end)), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's update."""
        alpha = next((alpha for end, alpha in self.alphas.items() if _ends(module, end)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def read_adapter_config(raw: Json, where: Path) -> AdapterConfig:
    """Check the content of an adapter_config.json.

    Args:
        raw: the content.
        where: the file, for messages.

    Raises:
        ModelFileError: the adapter is not plain LoRA, or a field is missing or out of range; `field` names it.
    """

    def refused(field: str, why: str) -> ModelFileError:
        return ModelFileError(f"{where}: {field} is {repr(raw.get(field))[:80]}; {why}", field=field)

    if raw.get("peft_type") != "LORA":
        raise refused("peft_type", "only LORA is supported; train a LoRA adapter")
    for field, why in _REFUSED.items():
        if raw.get(field):
            raise refused(field, why)
    if raw.get("bias", "none") != "none":
        raise refused("bias", "LoRA biases are not supported; train with bias='none'")
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise refused(
            "init_lora_weights",
            "this initialization changes the base model's weights; convert the adapter to plain LoRA",
        )
    known = {"peft_type", "bias", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
    for field, value in raw.items():
        if field not in known and field not in _WITHOUT_EFFECT and field not in _REFUSED and value:
            raise ModelFileError(
                f"{where}: {repr(field)[1:-1][:80]} is {repr(value)[:80]}; this field is unknown and may change the"
                " result; remove it if it does not",
                field=field[:80],
            )
    is_rank_stabilized = raw.get("use_rslora", False)
    if not isinstance(is_rank_stabilized, bool):
        raise refused("use_rslora", "it must be true or false")
    return AdapterConfig(
        rank=_rank(raw.get("r"), where, "r"),
        alpha=_alpha(raw.get("lora_alpha"), where, "lora_alpha"),
        is_rank_stabilized=is_rank_stabilized,
        ranks={end: _rank(value, where, "rank_pattern") for end, value in _pattern(raw, where, "rank_pattern")},
        alphas={end: _alpha(value, where, "alpha_pattern") for end, value in _pattern(raw, where, "alpha_pattern")},
    )


def _ends(module: str, end: str) -> bool:
    return module == end or module.endswith("." + end)


def _pattern(raw: Json, where: Path, field: str) -> list[tuple[str, object]]:
    value = raw.get(field) or {}
    if not isinstance(value, dict) or len(value) > _MAX_PATTERNS:
        raise ModelFileError(
            f"{where}: {field} must be an object with at most {_MAX_PATTERNS} module names", field=field
        )
    for end in value:
        if not _MODULE.fullmatch(end):
            raise ModelFileError(
                f"{where}: {field} has the key {end[:80]!r}; regular expressions are not supported: list the modules "
                "by name",
                field=field,
            )
    return list(value.items())


def _rank(value: object, where: Path, field: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise ModelFileError(
            f"{where}: the rank in {field} must be a whole number from 1 to {MAX_RANK}, not {repr(value)[:80]}; train "
            "with a rank in this range",
            field=field,
        )
    return value


def _alpha(value: object, where: Path, field: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= 1e6:  # type: ignore[arg-type]
        raise ModelFileError(
            f"{where}: {field} must be a number between -1000000 and 1000000, not {repr(value)[:80]}",
            field=field,
        )
    assert isinstance(value, int | float)
    return float(value)
