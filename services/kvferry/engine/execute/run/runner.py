"""The host-driven runner: computes the forward pass of a step and samples on the host."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import InvariantBroken
from kvferry.core.sampling import SampledToken
from kvferry.engine.execute.models.model import Logits, Model
from kvferry.engine.execute.run.pooler import with_pooled
from kvferry.engine.execute.run.sampler import is_greedy, sample
from kvferry.engine.execute.run.scorer import Scores, score
from kvferry.engine.execute.run.tree_moves import tree_moves
from kvferry.engine.execute.tensors.batch import ShownStates, StepBatch, build_batch, pooled_rows
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.observe.watch import FORWARD, NO_WATCH, SAMPLE, StepWatch
from kvferry.engine.schedule.step.adapter_slots import PackedAdapter
from kvferry.engine.schedule.step.step import Sampled, StepPlan, StepResult, sampled_rows
from kvferry.kv.pages.layout import KvLayout


class Runner:
    """Runner that samples on the host. Keeps no request state between steps; call it from one thread at a time."""

    def __init__(self, model: Model, kv: PagedKv) -> None:
        """
        Raises:
            InvariantBroken: shape, dtype or device of the pages differ from the model's.
        """
        layout = kv.layout
        expected = KvLayout.of(
            model.config, block_tokens=layout.block_tokens, dtype=model.dtype, releases_windows=bool(layout.windows)
        )
        if kv.layout != expected:
            raise InvariantBroken(f"the pages have {kv.layout}; the model needs {expected}")
        if kv.device != model.device:
            raise InvariantBroken(f"the pages are on device {kv.device}, the model is on {model.device}")
        self.model = model
        self.kv = kv
        self._slots: dict[int, PackedAdapter] = {}
        self.shown: ShownStates | None = None
        """Hidden states of every row that steps return, for a head; `None` without a head."""
        self.watch: Callable[[StepPlan], None] | None = None
        """Callback for measurements, called with every plan before its execution."""
        self.phases: StepWatch = NO_WATCH
        """Observer of the phases of steps, called on the threads that prepare and compute."""
        self._kernel_seconds: Callable[[], Mapping[str, float]] | None = getattr(model, "phase_seconds", None)

    @property
    def why_no_new_weights(self) -> str | None:
        """Reason why the model cannot be exchanged between two steps, with a remedy; `None` if it can."""
        return None

    def use(self, model: Model) -> None:
        """Compute with another model of the same shape from the next step on; no step is in flight."""
        self.model = model
        self._kernel_seconds = getattr(model, "phase_seconds", None)

    def activate(self, slot: int, adapter: PackedAdapter) -> None:
        """Put an adapter into a slot, for all steps prepared from now on.

        Args:
            slot: index of the adapter slot.
            adapter: weights in the form that the model's kernels read.
        """
        self._slots[slot] = adapter

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step: the KV of every scheduled token and a token for each sampled row.
        Non-finite logits or hidden states fail only their own sequence (`StepResult.failures`).

        Raises:
            InvariantBroken: the plan does not match its sequences.
        """
        if not plan.scheduled:
            return StepResult({})
        return self.compute(self.prepare(plan)).result()

    def prepare(self, plan: StepPlan) -> "PreparedStep":
        """Prepare the step of a plan that is not empty.

        Raises:
            InvariantBroken: the plan does not match its sequences.
        """
        if self.watch is not None:
            self.watch(plan)
        size = self.kv.layout.block_tokens
        batch = build_batch(plan, block_tokens=size, adapters=self._slots, shown=self.shown)
        is_scoring = any(s.num_scored for s in plan.scheduled)
        return PreparedStep(plan, batch, is_greedy(plan.scheduled), is_scoring)

    def compute(self, step: "PreparedStep") -> "ComputedStep":
        """Compute a step."""
        plan = step.plan
        phases = self.phases
        phases.runner_phase(FORWARD)
        logits = self.model.compute(step.batch, self.kv)
        phases.runner_phase(SAMPLE)
        if phases is not NO_WATCH and self._kernel_seconds is not None:
            phases.kernels(self._kernel_seconds())
        hidden, tapped = logits.hidden, logits.tapped
        scores: Scores | None = None
        if step.is_scoring:
            scores = score(logits, plan.scheduled)
            logits = logits.of_rows(sampled_rows(plan.scheduled))
        has_trees = len(step.batch.trees) > 0
        sampled = None if step.is_greedy and not has_trees else sample(logits, plan.scheduled)
        if has_trees and sampled is not None:
            self.kv.move_tokens(tree_moves(plan.scheduled, sampled, step.batch))
        phases.runner_phase("")
        return ComputedStep(step, logits, sampled, scores, hidden, tapped, self.shown)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedStep:
    """A step that can be computed."""

    plan: StepPlan
    batch: StepBatch
    is_greedy: bool
    """Whether every token is the argmax of its row."""
    is_scoring: bool
    """Whether any row scores a token of a prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class ComputedStep:
    """A computed step, whose result is built when it is read."""

    prepared: PreparedStep
    logits: Logits
    """Logits of the sampled rows; their values are valid until the next step."""
    sampled: Sequence[Sampled] | None
    """Results of the sampled rows; `None` if they are the argmax of the logits."""
    scores: Scores | None
    hidden: npt.NDArray[np.float32] | None = None
    """Hidden states of the pooled rows, or of all rows if a head reads them; `None` without such rows."""
    tapped: npt.NDArray[np.float32] | None = None
    """Inputs of the layers that a head reads, for all rows; `None` without such a head."""
    shown: ShownStates | None = None
    """Hidden states that a head reads; `None` without a head."""

    @property
    def tokens(self) -> list[int]:
        """Token of each sampled row; arbitrary if the row has none."""
        if self.sampled is None:
            return self.logits.greedy
        return [s.token_id if isinstance(s, SampledToken) else 0 for s in self.sampled]

    def result(self) -> StepResult:
        """Build the result of the step."""
        step = self.prepared
        sampled = sample(self.logits, step.plan.scheduled) if self.sampled is None else self.sampled
        plan = step.plan.scheduled
        result = StepResult.of(plan, sampled, self.scores)
        hidden = self.hidden
        if self.shown is not None:
            result = replace(result, hidden=hidden if self.tapped is None else self.tapped)
            if self.tapped is None and hidden is not None:
                hidden = hidden[rows] if len(rows := pooled_rows(plan)) else None
        return result if hidden is None else with_pooled(result, hidden, plan)
