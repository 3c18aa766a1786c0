"""Runs step plans on a device without asking it for anything on the way: launches, draws there, tokens copied aside.

    begin   arrays ─► model ─► most likely token of each row ─► draws of the rows that wish more ─► copy to the host
    result  waits for that copy; errors of the step come out here

Steps in which everybody computes one token are replayed where they were captured (`steps`), small steps with
prompts by pieces (`pieces`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.errors import InvariantBroken
from kvferry.core.sampling import SampledToken
from kvferry.engine.batch import build_batch
from kvferry.engine.cache import PagedKv
from kvferry.engine.device_batch import DeviceBatch, to_device
from kvferry.engine.gpu.draws import NONE_LEFT, draw, most_likely
from kvferry.engine.gpu.graphs import Graphs
from kvferry.engine.gpu.outbox import Arrival, Outbox
from kvferry.engine.gpu.pieces import CapturedPieces
from kvferry.engine.gpu.places import Places
from kvferry.engine.gpu.steps import CapturedSteps
from kvferry.engine.models.transformer import Transformer, logits_of
from kvferry.engine.runner import Runner
from kvferry.engine.sampler import sample
from kvferry.engine.step import ScheduledSequence, StepPlan, StepResult
from kvferry.engine.wishes import Way, not_finite, way_of
from kvferry.kernels.ops import DeviceOps


@dataclass(slots=True, eq=False)
class UnderWay:
    """A step that was launched."""

    sampling: tuple[ScheduledSequence, ...]
    """Those that draw, in the order of their rows."""
    read: Callable[[], list[int]]
    """Waits for their tokens."""
    by_host: dict[int, SampledToken]
    """Drawn already, by row."""

    def result(self) -> StepResult:
        """Wait for the step's tokens.

        Raises:
            InvariantBroken: a logit is not finite, or a request banned every token.
        """
        if not self.sampling:
            return StepResult({})
        tokens = {}
        for row, (s, token) in enumerate(zip(self.sampling, self.read(), strict=True)):
            if token == NONE_LEFT:
                raise InvariantBroken(f"request {s.request_id}: no token is left to draw")
            if token < 0:
                raise not_finite(s)
            tokens[s.request_id] = self.by_host.get(row) or SampledToken(token)
        return StepResult(tokens)


class DeviceRunner(Runner):
    """One model over one pool of pages, both on one device. Calls from one thread at a time."""

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
            model: of the family that `ops` is of.
            kv: its pages.
            ops: the device's.
            max_sequences: in one step.
            graphs: what captures steps of one token each; `None`: none are.
            piece_rows: rows of steps with prompts that are captured between attentions, ascending; none if empty.
            clock: tells `watch_waits` how long the host waited.

        Raises:
            InvariantBroken: the pages are not of the model's shape and type, or not where it computes.
        """
        super().__init__(model, kv)
        self._transformer, self._ops, self._clock = model, ops, clock or SystemClock()
        self.watch_waits: Callable[[float], None] | None = None
        """Told after each step for how many seconds the host waited for the device; for whoever measures."""
        self.replays = True
        """Whether captured steps are replayed; for whoever measures."""
        width = -(-model.config.max_model_tokens // kv.shape.block_tokens)
        with torch.inference_mode():
            self._last = torch.zeros(max_sequences + 1, dtype=torch.int64, device=model.torch_device)
            self._captured: CapturedSteps | None = None
            self._pieces: CapturedPieces | None = None
            if graphs is not None:
                self._captured = CapturedSteps(
                    model, kv, ops, graphs, max_sequences=max_sequences, last=self._last, clock=clock
                )
                width = self._captured.width
                self._pieces = CapturedPieces(model, kv, graphs, piece_rows) if piece_rows else None
                self._captured.capture_next()  # the largest: from now on every batch has one
        self._places = Places(max_sequences, width)
        self._outbox = Outbox(model.torch_device, max_sequences)

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step and wait for its tokens.

        Raises:
            InvariantBroken: as `begin` and `UnderWay.result`.
        """
        return self.begin(plan).result()

    def begin(self, plan: StepPlan) -> UnderWay:
        """Launch a step, and capture what is left to be captured behind it.

        Raises:
            InvariantBroken: the plan does not fit its sequences.
        """
        step = self.launch(plan)
        self._capture_next()
        return step

    def may_follow(self, plan: StepPlan) -> bool:
        """Whether a step could be launched before the tokens that it computes are known: it is replayed, and the device
        has them."""
        if self._captured is None or not self.replays or self._captured.size_for(plan.scheduled) is None:
            return False
        return all(map(self._places.is_drawn_here, plan.scheduled))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> UnderWay:
        """Launch a step; nothing waits for the device unless a sequence wants log-probabilities.

        Raises:
            InvariantBroken: the plan does not fit its sequences.
        """
        if not plan.scheduled:
            return UnderWay((), list, {})
        if self.watch is not None:
            self.watch(plan)
        try:
            return self._launch(plan)
        except BaseException:
            self._places.forget()  # whatever of the step has reached the device, its places' books do not say
            raise

    def _launch(self, plan: StepPlan) -> UnderWay:
        self._outbox.before_next_step()
        numbers = self._places.seat(plan.scheduled)
        size = self._captured.size_for(plan.scheduled) if self._captured is not None and self.replays else None
        if self._captured is not None and size is not None:
            logits, best = self._captured.run(size, plan.scheduled, numbers, self._places)
            rows = [row for row, s in enumerate(plan.scheduled) if s.samples]
        else:
            logits, best = self._uncaptured(plan)
            rows = list(range(len(best)))
        for s in plan.scheduled:
            if not s.samples:
                self._places.drew(s, on_device=False)
        sampling = tuple(s for s in plan.scheduled if s.samples)
        if not sampling:
            return UnderWay((), list, {})
        own = [number for number, s in zip(numbers, plan.scheduled, strict=True) if s.samples]
        return self._drawn(logits, best, sampling, rows, own, keeps=size is not None)

    def _uncaptured(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the rows that sample, and the most likely token of each."""
        plain = build_batch(plan, block_tokens=self.kv.shape.block_tokens)
        batch = DeviceBatch.of(plain, self._transformer.torch_device)
        size = self._pieces.size_for(len(batch.token_ids)) if self._pieces is not None and self.replays else None
        if self._pieces is not None and size is not None:
            hidden = self._pieces.run(size, batch)
        else:
            hidden = self._transformer.forward(batch.token_ids, batch.positions, self.kv.pages, batch.attention)
        if not len(batch.sample_rows):
            return hidden[:0], batch.sample_rows
        logits = self._transformer.logits(hidden, batch.sample_rows)
        return logits, most_likely(logits)

    def _drawn(
        self,
        logits: torch.Tensor,
        best: torch.Tensor,
        sampling: tuple[ScheduledSequence, ...],
        rows: Sequence[int],
        places: Sequence[int],
        *,
        keeps: bool,
    ) -> UnderWay:
        """Draw and send. `keeps`: the most likely tokens are at their places already."""
        ways = [way_of(s) for s in sampling]
        drawing = [i for i, way in enumerate(ways) if way is Way.DRAWN]
        by_host = {i: self._by_host(logits, rows[i], sampling[i]) for i, way in enumerate(ways) if way is Way.HOST}
        if drawing:
            index = self._sent([[rows[i] for i in drawing], [places[i] for i in drawing]])
            tokens = draw(self._ops, logits, best, [sampling[i] for i in drawing], index[0])
            best.scatter_(0, index[0], tokens)
            self._last.scatter_(0, index[1], tokens)
        if not keeps:
            self._last.scatter_(0, self._sent([places])[0], best)
        for i, s in enumerate(sampling):
            self._places.drew(s, on_device=i not in by_host)
        sent = best[: len(rows)] if rows[-1] + 1 == len(rows) else best.index_select(0, self._sent([list(rows)])[0])
        arrival = self._outbox.send(sent)
        return UnderWay(sampling, lambda: self._read(arrival), by_host)

    def _read(self, arrival: Arrival) -> list[int]:
        begun = self._clock.monotonic()
        tokens = arrival.read()
        if self.watch_waits is not None:
            self.watch_waits(self._clock.monotonic() - begun)
        return tokens

    def _by_host(self, logits: torch.Tensor, row: int, s: ScheduledSequence) -> SampledToken:
        return sample(logits_of(logits[row : row + 1]), [s])[0]

    def _sent(self, numbers: Sequence[Sequence[int]]) -> torch.Tensor:
        return to_device(torch.from_numpy(np.array(numbers, np.int64)), self._transformer.torch_device)

    @property
    def is_warming(self) -> bool:
        """Whether something is still to be captured."""
        return any(part is not None and part.is_waiting for part in (self._captured, self._pieces))

    def capture_all(self) -> None:
        """Capture now what would be captured behind the next steps; for whoever measures."""
        while self.is_warming:
            self._capture_next()

    @torch.inference_mode()
    def _capture_next(self) -> None:
        """Behind a step that is under way, one recording more; after a number of steps there is none left."""
        for part in (self._captured, self._pieces):
            if part is not None and part.is_waiting:
                self._outbox.before_next_step()  # a recording's first run writes where this step's tokens are
                part.capture_next()
                return
