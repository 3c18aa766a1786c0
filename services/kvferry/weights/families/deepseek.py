"""DeepSeek V2 and V3: latent attention, shared experts, and routing that is limited to groups of experts.

Sources: DeepSeek-AI, DeepSeek-V2, 2024, sections 2.1 and 2.2; DeepSeek-V3 Technical Report, 2024, section 2.1.2.
"""

import math
import re
from dataclasses import replace

from kvferry.weights.config import Experts, Latent, ModelConfig, Scoring
from kvferry.weights.families.config_fields import ConfigFields
from kvferry.weights.families.family import Family
from kvferry.weights.families.mixtures import read_experts

_GROUPED, _CORRECTED = "group_limited_greedy", "noaux_tc"
_RENAMES = ((re.compile(r"\.mlp\.shared_experts\."), ".mlp.shared_expert."),)


def _latent(fields: ConfigFields, *, is_interleaved: bool) -> Latent:
    latent = Latent(
        rank=fields.whole("kv_lora_rank"),
        rotated=fields.whole("qk_rope_head_dim"),
        plain=fields.whole("qk_nope_head_dim"),
        value=fields.whole("v_head_dim"),
        query_rank=fields.optional_whole("q_lora_rank"),
        is_interleaved=is_interleaved,
    )
    if latent.rotated % 2:
        fields.refuse("qk_rope_head_dim", "it must be even")
    return latent


def _score_scale(fields: ConfigFields, latent: Latent) -> float | None:
    """Return the factor of attention scores; `None` for the default, 1 / sqrt(head_dim). YaRN multiplies it by the
    square of the magnitude of `mscale_all_dim`."""
    given = fields.inner("rope_parameters") or fields.inner("rope_scaling")
    if given is None or (given.value("rope_type") or given.value("type") or "default") == "default":
        return None
    if not given.value("mscale_all_dim"):
        return None
    factor, weight = given.real("factor"), given.real("mscale_all_dim")
    return (1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0) ** 2 / math.sqrt(
        latent.plain + latent.rotated
    )


def _groups(fields: ConfigFields, experts: Experts) -> Experts:
    """Read the groups of experts.

    Raises:
        ModelFileError: the number of experts is not divisible by the number of groups, or the active groups have fewer
            experts than are active.
    """
    groups = fields.whole("n_group", 1)
    active = fields.whole("topk_group", groups)
    if experts.count % groups:
        fields.refuse("n_group", f"{experts.count} experts are not divisible by it")
    if active > groups or active * (experts.count // groups) < experts.active:
        fields.refuse("topk_group", f"there are {groups} groups of {experts.count // groups} experts")
    return replace(experts, groups=groups, active_groups=active)


def _adapt(fields: ConfigFields, llama: ModelConfig, *, is_interleaved: bool, experts: Experts) -> ModelConfig:
    latent = _latent(fields, is_interleaved=is_interleaved)
    given = fields.value("first_k_dense_replace")
    if given is not None and (type(given) is not int or given < 0):
        fields.refuse("first_k_dense_replace", "it must be a number of layers")
    first = min(given or 0, llama.num_layers)
    shared = fields.value("n_shared_experts")
    size = experts.intermediate_size * fields.whole("n_shared_experts") if shared else 0
    found = replace(experts, shared_size=size, has_shared_gate=False, dense_layers=tuple(range(first)))
    return replace(
        llama,
        num_kv_heads=1,
        head_dim=latent.plain + latent.rotated,
        attention_scale=_score_scale(fields, latent),
        latent=latent,
        experts=found if first < llama.num_layers else None,
    )


def _routed(fields: ConfigFields, *, renormalizes: bool) -> Experts:
    count = "n_routed_experts" if fields.value("n_routed_experts") is not None else "num_local_experts"
    experts = read_experts(fields, count, "moe_intermediate_size", renormalizes=renormalizes)
    return replace(experts, weight_scale=fields.real("routed_scaling_factor", 1.0))


def _adapt_2(fields: ConfigFields, llama: ModelConfig) -> ModelConfig:
    if fields.flag("norm_topk_prob"):
        fields.refuse("norm_topk_prob", "this class does not renormalize the weights of experts")
    experts = _routed(fields, renormalizes=False)
    method = fields.value("topk_method")
    if method == _GROUPED:
        experts = _groups(fields, experts)
    elif method not in (None, "greedy"):
        fields.refuse("topk_method", f"known methods are greedy and {_GROUPED}")
    fields.ignore("n_group", "topk_group")
    return _adapt(fields, llama, is_interleaved=True, experts=experts)


def _adapt_3(fields: ConfigFields, llama: ModelConfig) -> ModelConfig:
    for key, known in (("topk_method", _CORRECTED), ("scoring_func", "sigmoid")):
        if fields.value(key) not in (None, known):
            fields.refuse(key, f"only {known} is")
    routed = _routed(fields, renormalizes=fields.flag("norm_topk_prob", default=True))
    experts = replace(_groups(fields, routed), scoring=Scoring.SIGMOID)
    if experts.count // experts.groups < 2:
        fields.refuse(
            "n_group", "a group needs at least two experts, since groups are ranked by the sum of their two best scores"
        )
    interleaved = fields.flag("rope_interleave", default=True)
    return _adapt(fields, llama, is_interleaved=interleaved, experts=experts)


_LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    title="DeepSeek V2, V2-Lite, V2.5",
    architecture="DeepseekV2ForCausalLM",
    adapt=_adapt_2,
    defaults=_LATENT | {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407},
    ignores=("rope_interleave",),
    renames=_RENAMES,
    gguf="deepseek2",
)
DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    title="DeepSeek V3, V3.1, R1",
    architecture="DeepseekV3ForCausalLM",
    adapt=_adapt_3,
    defaults=_LATENT
    | {
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
    },
    renames=_RENAMES,
    ignores_further_layers=True,
    gguf="deepseek2",
)
