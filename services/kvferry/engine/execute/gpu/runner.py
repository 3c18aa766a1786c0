"""The GPU runner: launches steps without host synchronization, samples on the device, copies tokens asynchronously.

    begin   arrays ─► model ─► argmax of each row ─► sampling of other rows ─► copy of tokens
    result  waits for that copy; raises the step's errors

Pure decode steps are replayed from captured graphs (`steps`), small steps with prefill piecewise (`piecewise_graphs`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.sampling import SampledToken
from kvferry.engine.execute.gpu.draws import NONE_LEFT, draw, most_likely
from kvferry.engine.execute.gpu.graphs import Graphs
from kvferry.engine.execute.gpu.outbox import Outbox, PendingTokens
from kvferry.engine.execute.gpu.piecewise_graphs import PiecewiseGraphs
from kvferry.engine.execute.gpu.steps import CapturedSteps
from kvferry.engine.execute.models.torch_adapter import step_adapters
from kvferry.engine.execute.models.transformer import Transformer, logits_of
from kvferry.engine.execute.run.pooler import with_pooled
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.run.sampler import sample
from kvferry.engine.execute.run.scorer import Scores, score
from kvferry.engine.execute.tensors.batch import build_batch
from kvferry.engine.execute.tensors.device_batch import DeviceBatch, to_device
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.schedule.step.batch_slots import BatchSlots
from kvferry.engine.schedule.step.sampling_plan import SamplingPath, needs_host, none_left, not_finite, sampling_path
from kvferry.engine.schedule.step.step import Sampled, ScheduledSequence, StepPlan, StepResult, drawn_rows, sampled_rows
from kvferry.kernels.ops import DeviceOps


@dataclass(slots=True, eq=False)
class LaunchedGpuStep:
    """A launched step whose tokens have not been read."""

    scheduled: tuple[ScheduledSequence, ...]
    sampling: Sequence[ScheduledSequence]
    """Sequence of each sampled row, in the order of rows (`step.drawn_rows`)."""
    read: Callable[[], list[int]]
    """Waits for the sampled tokens and returns their ids."""
    by_host: dict[int, Sampled]
    """Results that were sampled on the host, by row."""
    scores: Scores = field(default_factory=dict)
    """Scored tokens of prompts, by request."""
    hidden: torch.Tensor | None = None
    """[H, hidden] float32: hidden states of the pooled rows, on the device; `None` without such rows."""

    def result(self) -> StepResult:
        """Wait for the step's results. A non-finite logit or hidden state, or a row with no token to sample, fails only
        its own sequence."""
        if self.hidden is None:
            return self._sampled()
        return with_pooled(self._sampled(), self.hidden.cpu().numpy(), self.scheduled)

    def _sampled(self) -> StepResult:
        if not self.sampling:
            return StepResult.of(self.scheduled, (), self.scores)
        sampled: list[Sampled] = []
        for row, (s, token) in enumerate(zip(self.sampling, self.read(), strict=True)):
            if token == NONE_LEFT:
                sampled.append(none_left(s))
            elif token < 0:
                sampled.append(not_finite(s))
            else:
                sampled.append(self.by_host[row] if row in self.by_host else SampledToken(token))
        return StepResult.of(self.scheduled, sampled, self.scores)


class DeviceRunner(Runner):
    """Runner for one model and its pages on one device. Call it from one thread at a time."""

    def __init__(
        self,
        model: Transformer,
        kv: PagedKv,
        ops: DeviceOps,
        *,
        max_sequences: int,
        graphs: Graphs | None = None,
        piece_rows: Sequence[int] = (),
        clock: Clock | None = None,
    ) -> None:
        """
        Args:
            model: the model; its kernels belong to the same backend as `ops`.
            kv: the model's KV pages.
            ops: the device's kernels.
            max_sequences: maximum number of sequences in a step.
            graphs: captures decode steps; `None` disables capture.
            piece_rows: batch sizes of prefill steps to capture piecewise, in rows, ascending; `()` disables it.
            clock: measures the host's waits for `watch_waits`.

        Raises:
            InvariantBroken: shape, dtype or device of the pages differ from the model's.
        """
        super().__init__(model, kv)
        self._transformer, self._ops, self._clock = model, ops, clock or SystemClock()
        self.watch_waits: Callable[[float], None] | None = None
        """Callback for measurements; called after each step with the number of seconds that the host waited for the
        device."""
        self.replays = True
        """Whether captured steps are replayed; set to `False` only for measurements."""
        width = -(-model.config.max_model_tokens // kv.layout.block_tokens)
        with torch.inference_mode():
            self._last = torch.zeros(max_sequences + 1, dtype=torch.int64, device=model.torch_device)
            self._captured: CapturedSteps | None = None
            self._pieces: PiecewiseGraphs | None = None
            if graphs is not None:
                self._captured = CapturedSteps(
                    model, kv, ops, graphs, max_sequences=max_sequences, last=self._last, clock=clock
                )
                width = self._captured.width
                # Pieces support the slots of only one layer group.
                has_pieces = bool(piece_rows) and not kv.layout.windows
                self._pieces = PiecewiseGraphs(model, kv, graphs, piece_rows) if has_pieces else None
                self._captured.capture_next()  # the largest batch size first, so that every batch can be replayed
        self._places = BatchSlots(max_sequences, width, len(kv.layout.groups.windows))
        self._outbox = Outbox(model.torch_device, max_sequences)

    @property
    def why_no_new_weights(self) -> str | None:
        return "captured steps read the weights of the model that they were captured with; restart the worker"

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step and wait for its tokens.

        Raises:
            InvariantBroken: see `begin` and `LaunchedGpuStep.result`.
        """
        return self.begin(plan).result()

    def begin(self, plan: StepPlan) -> LaunchedGpuStep:
        """Launch a step, then capture one of the remaining batch sizes.

        Raises:
            InvariantBroken: the plan does not fit its sequences.
        """
        step = self.launch(plan)
        self._capture_next()
        return step

    def may_follow(self, plan: StepPlan) -> bool:
        """Return whether a step can be launched before the host has its input tokens: a replay with inputs on the
        device, whose tokens are also sampled there."""
        if any(map(needs_host, plan.scheduled)):
            return False
        if self._captured is None or not self.replays or self._captured.size_for(plan.scheduled) is None:
            return False
        return all(map(self._places.is_drawn_here, plan.scheduled))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedGpuStep:
        """Launch a step; the host waits for the device only if a sequence requests log-probabilities or is sampled on
        the host.

        Raises:
            InvariantBroken: the plan does not fit its sequences.
        """
        if not plan.scheduled:
            return LaunchedGpuStep((), (), list, {})
        if self.watch is not None:
            self.watch(plan)
        try:
            return self._launch(plan)
        except BaseException:
            self._places.forget()  # after a failed launch the state of the batch slots on the device is unknown
            raise

    def _launch(self, plan: StepPlan) -> LaunchedGpuStep:
        self._outbox.before_next_step()
        numbers = self._places.assign(plan.scheduled)
        scores: Scores = {}
        hidden: torch.Tensor | None = None
        size = self._captured.size_for(plan.scheduled) if self._captured is not None and self.replays else None
        if self._captured is not None and size is not None:
            logits, best = self._captured.run(size, plan.scheduled, numbers, self._places)
            rows = [row for row, s in enumerate(plan.scheduled) if s.num_sampled]
        else:
            logits, best, hidden = self._uncaptured(plan)
            if any(s.num_scored for s in plan.scheduled):
                scores = score(logits_of(logits), plan.scheduled)
                drawing = self._sent([sampled_rows(plan.scheduled)])[0]
                logits, best = logits.index_select(0, drawing), best.index_select(0, drawing)
            rows = list(range(len(best)))
        for s in plan.scheduled:
            if s.num_sampled != 1:  # the last accepted token is known only after verification
                self._places.drew(s, on_device=False)
        sampling = drawn_rows(plan.scheduled)
        if not sampling:
            return LaunchedGpuStep(plan.scheduled, (), list, {}, scores, hidden)
        own: list[int] = []
        for number, s in zip(numbers, plan.scheduled, strict=True):
            own += [number] if s.num_sampled == 1 else [self._places.spare] * s.num_sampled
        by_host, read = self._drawn(logits, best, sampling, rows, own, keeps=size is not None)
        return LaunchedGpuStep(plan.scheduled, sampling, read, by_host, scores, hidden)

    def _uncaptured(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Run a step eagerly or piecewise; return the logits of the sampled rows, the argmax of each, and the hidden
        states of the pooled rows."""
        plain = build_batch(plan, block_tokens=self.kv.layout.block_tokens, adapters=self._slots)
        batch = DeviceBatch.of(plain, self._transformer.torch_device)
        adapters = step_adapters(plain, self._transformer.torch_device)
        size = None
        if self._pieces is not None and self.replays and adapters is None:  # pieces do not compute adapter updates
            size = self._pieces.size_for(len(batch.token_ids))
        if self._pieces is not None and size is not None:
            hidden = self._pieces.run(size, batch)
        else:
            hidden = self._transformer.compute_hidden(plain, batch, self.kv, adapters)
        shown = None if batch.hidden_rows is None else self._transformer.hidden_states(hidden, batch.hidden_rows)
        if not len(batch.sample_rows):
            return hidden[:0], batch.sample_rows, shown
        logits = self._transformer.logits(hidden, batch.sample_rows)
        return logits, most_likely(logits), shown

    def _drawn(
        self,
        logits: torch.Tensor,
        best: torch.Tensor,
        sampling: Sequence[ScheduledSequence],
        rows: Sequence[int],
        places: Sequence[int],
        *,
        keeps: bool,
    ) -> tuple[dict[int, Sampled], Callable[[], list[int]]]:
        """Sample and start the copy to the host; return the tokens sampled on the host, by row, and a function that
        waits for all tokens. `keeps` is whether greedy tokens are already in their batch slots."""
        ways = [sampling_path(s) for s in sampling]
        drawing = [i for i, way in enumerate(ways) if way is SamplingPath.DRAWN]
        by_host = {
            i: self._by_host(logits, rows[i], sampling[i]) for i, way in enumerate(ways) if way is SamplingPath.HOST
        }
        if drawing:
            index = self._sent([[rows[i] for i in drawing], [places[i] for i in drawing]])
            tokens = draw(self._ops, logits, best, [sampling[i] for i in drawing], index[0])
            best.scatter_(0, index[0], tokens)
            self._last.scatter_(0, index[1], tokens)
        if not keeps:
            self._last.scatter_(0, self._sent([places])[0], best)
        for i, s in enumerate(sampling):
            if places[i] != self._places.spare:
                self._places.drew(s, on_device=i not in by_host)
        sent = best[: len(rows)] if rows[-1] + 1 == len(rows) else best.index_select(0, self._sent([list(rows)])[0])
        pending = self._outbox.send(sent)
        return by_host, lambda: self._read(pending)

    def _read(self, pending: PendingTokens) -> list[int]:
        begun = self._clock.monotonic()
        tokens = pending.read()
        if self.watch_waits is not None:
            self.watch_waits(self._clock.monotonic() - begun)
        return tokens

    def _by_host(self, logits: torch.Tensor, row: int, s: ScheduledSequence) -> Sampled:
        return sample(logits_of(logits[row : row + 1]), [s])[0]

    def _sent(self, numbers: Sequence[Sequence[int]]) -> torch.Tensor:
        return to_device(torch.from_numpy(np.array(numbers, np.int64)), self._transformer.torch_device)

    @property
    def is_warming(self) -> bool:
        """Whether batch sizes remain to be captured."""
        return any(part is not None and part.is_waiting for part in (self._captured, self._pieces))

    def capture_all(self) -> None:
        """Capture all remaining batch sizes now instead of one per step; for measurements."""
        while self.is_warming:
            self._capture_next()

    @torch.inference_mode()
    def _capture_next(self) -> None:
        """Capture one more batch size while the device runs a step, so that requests do not wait for all captures."""
        for part in (self._captured, self._pieces):
            if part is not None and part.is_waiting:
                self._outbox.before_next_step()  # the capture's first run overwrites this step's tokens
                part.capture_next()
                return
