"""Builds a model that several ranks compute: starts their processes, and loads the first rank's share meanwhile."""

import logging

from kvferry.core.errors import UsageError
from kvferry.core.process.cores import core_groups, usable_cores
from kvferry.core.settings.engine import FAST, EngineSettings, SchedulerLimits
from kvferry.engine.execute.models.build import WEIGHTS, check_fast, level_of, resolve_kernels
from kvferry.engine.execute.ranks.messages import ModelPlan
from kvferry.engine.execute.ranks.rank_group import RankGroup
from kvferry.engine.execute.ranks.ranked_model import RankedModel
from kvferry.engine.execute.ranks.share_model import load_share, on_cores
from kvferry.engine.execute.tensors.device import CPU
from kvferry.engine.schedule.speculation.settings import MAX_DRAFT_TOKENS
from kvferry.weights.config import ModelConfig
from kvferry.weights.shares import Share, check_divides
from kvferry.weights.tensors import TensorSource

STEP_SECONDS = 30.0
"""How long a rank waits for another one within a step; between two waits, each computes less than a layer."""
_log = logging.getLogger(__name__)


def build_ranked_model(
    config: ModelConfig, tensors: TensorSource, settings: EngineSettings, *, dtype: str, device: str
) -> RankedModel:
    """Load a model into `settings.tensor_parallel` ranks, of which this process is the first.

    Args:
        config: the model's shape, as served.
        tensors: the model's weights.
        settings: settings of the engine.
        dtype: data type of the KV.
        device: device of the model.

    Raises:
        ModelFileError: the weights do not match the configuration.
        UsageError: the model cannot be divided among the ranks, or its kernels or device have none.
        InvariantBroken: the process of a rank has ended.
    """
    size = settings.tensor_parallel
    check_divides(config, size)
    level = level_of(resolve_kernels(settings.kernels, config, dtype, device)) if device == CPU else ""
    if not level:
        raise UsageError(
            f"tensor_parallel {size} needs the compiled kernels on a CPU, not {settings.kernels!r} on {device}; use 1",
            field="tensor_parallel",
        )
    if settings.numerics == FAST:
        check_fast(level, dtype)
    limits = settings.limits
    plan = ModelPlan(
        model=settings.model,
        load_format=settings.load_format,
        max_model_len=settings.max_model_len,
        seed=settings.seed,
        size=size,
        dtype=dtype,
        form=WEIGHTS[settings.weights],
        level=level,
        threads=max(1, (settings.threads or usable_cores()) // size),
        rounds_inputs=settings.numerics == FAST,
        step_rows=limits.token_budget + _drafted(limits),
        logit_rows=limits.max_scored_rows + limits.max_num_seqs + _drafted(limits),
        seconds=STEP_SECONDS,
    )
    cores = core_groups(size)
    try:
        group = RankGroup(plan, config, cores)
    except OSError as error:
        raise UsageError(f"the {size} ranks of the model cannot start: {error}", field="tensor_parallel") from error
    try:
        with on_cores(cores[0]):
            own = load_share(plan, config, tensors, Share(0, size), group.sums)
        assert own.place is not None
        group.watch(own.place.ranks.fail)
        group.wait_ready()
    except BaseException:
        group.close()
        raise
    _log.info("%d ranks compute %s; compute threads of each: %d", size, config.name, plan.threads)
    return RankedModel(own, group, plan)


def _drafted(limits: SchedulerLimits) -> int:
    """Return the maximum number of rows of a step for draft tokens."""
    return limits.max_num_seqs * MAX_DRAFT_TOKENS
