"""Runs step plans: arrays, forward pass, logits of the rows that sample, tokens."""

from collections.abc import Callable

from kvferry.core.errors import InvariantBroken
from kvferry.engine.batch import build_batch
from kvferry.engine.cache import PagedKv, PageShape
from kvferry.engine.models.model import Model
from kvferry.engine.sampler import sample
from kvferry.engine.step import StepPlan, StepResult


class Runner:
    """One model over one pool of pages. Keeps nothing of a request between steps; calls from one thread at a time."""

    def __init__(self, model: Model, kv: PagedKv) -> None:
        """
        Raises:
            InvariantBroken: the pages are not of the model's shape and type, or not where it computes.
        """
        expected = PageShape.of(model.config, block_tokens=kv.shape.block_tokens, dtype=model.dtype)
        if kv.shape != expected:
            raise InvariantBroken(f"pages of {kv.shape} were given to a model that needs {expected}")
        if kv.device != model.device:
            raise InvariantBroken(f"pages on {kv.device} were given to a model on {model.device}")
        self.model = model
        self.kv = kv
        self.watch: Callable[[StepPlan], None] | None = None
        """Told of every step before it runs; for whoever measures."""

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step: KV of every scheduled token into its page, and a token for each sequence that samples.

        Raises:
            InvariantBroken: the plan does not fit its sequences, or a logit is not finite.
        """
        if not plan.scheduled:
            return StepResult({})
        if self.watch is not None:
            self.watch(plan)
        batch = build_batch(plan, block_tokens=self.kv.shape.block_tokens)
        logits = self.model.compute(batch, self.kv)
        sampling = [s for s in plan.scheduled if s.samples]
        if not sampling:
            return StepResult({})
        tokens = sample(logits, sampling)
        return StepResult({s.request_id: token for s, token in zip(sampling, tokens, strict=True)})
