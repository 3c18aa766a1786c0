"""The host-driven runner: executes a step's page copies and forward pass, and samples on the host."""

from collections.abc import Callable, Sequence

from kvferry.core.errors import InvariantBroken
from kvferry.engine.blocks.allocation import PageCopy
from kvferry.engine.models.model import Model
from kvferry.engine.plan.step import StepPlan, StepResult, drawn_rows, sampled_rows
from kvferry.engine.run.sampler import sample
from kvferry.engine.run.scorer import score
from kvferry.engine.tensors.batch import build_batch
from kvferry.engine.tensors.paged_kv import PagedKv
from kvferry.kv.pages.layout import KvLayout


class Runner:
    """Runner that samples on the host. Keeps no request state between steps; call it from one thread at a time."""

    def __init__(self, model: Model, kv: PagedKv) -> None:
        """
        Raises:
            InvariantBroken: shape, dtype or device of the pages differ from the model's.
        """
        expected = KvLayout.of(model.config, block_tokens=kv.layout.block_tokens, dtype=model.dtype)
        if kv.layout != expected:
            raise InvariantBroken(f"the pages have {kv.layout}; the model needs {expected}")
        if kv.device != model.device:
            raise InvariantBroken(f"the pages are on device {kv.device}, the model is on {model.device}")
        self.model = model
        self.kv = kv
        self.watch: Callable[[StepPlan], None] | None = None
        """Callback for measurements, called with every plan before its execution."""

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Make a step's page copies before the step writes any KV (invariant I10).

        Raises:
            InvariantBroken: the source or target of a copy is not a page of the pool.
        """
        self.kv.copy_pages(copies)

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step: page copies, then the KV of every scheduled token and a token for each sampled row.
        Non-finite logits fail only their own sequence (`StepResult.failures`).

        Raises:
            InvariantBroken: the plan does not match its sequences.
        """
        if not plan.scheduled:
            return StepResult({})
        if self.watch is not None:
            self.watch(plan)
        batch = build_batch(plan, block_tokens=self.kv.layout.block_tokens)
        if plan.copies:
            self.copy_pages(plan.copies)
        logits = self.model.compute(batch, self.kv)
        sampling = drawn_rows(plan.scheduled)
        if not any(s.num_scored for s in plan.scheduled):
            return StepResult.of(plan.scheduled, sample(logits, sampling)) if sampling else StepResult({})
        scores = score(logits, plan.scheduled)
        return StepResult.of(plan.scheduled, sample(logits.of_rows(sampled_rows(plan.scheduled)), sampling), scores)
