"""Decode steps whose launches are recorded: one recording for each size of batch, over inputs that stay in place.

    host       [5, size] pinned ──one copy──► [5, size]     given token, place, position, context, slot of each row
    changed blocks ──when there are any──────► tables       a row for each running sequence, as `places` says
    replay     tokens = given, or what the place's last step drew ─► model ─► logits ─► most likely ─► last of place

Rows beyond the batch are padding: their place is the spare one, their context is 0, so attention gives them zeros, and
their slot is -1, so nothing of them is written to a page.
"""

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvferry.core.clock import Clock, SystemClock
from kvferry.engine.batch import check_room, slots_of
from kvferry.engine.cache import PagedKv
from kvferry.engine.device_batch import to_device
from kvferry.engine.gpu import graph_sizes
from kvferry.engine.gpu.draws import most_likely
from kvferry.engine.gpu.graphs import Graphs, Launch
from kvferry.engine.gpu.places import Places
from kvferry.engine.models.transformer import Rows, Transformer
from kvferry.engine.step import ScheduledSequence
from kvferry.kernels.batch import SingleRows
from kvferry.kernels.ops import DeviceOps

_log = logging.getLogger(__name__)

_GIVEN, _PLACE, _POSITION, _CONTEXT, _SLOT = range(5)
_FROM_PLACE = -1
"""As a given token: take what the place's sequence drew last."""
_TURNS = 2
"""Host buffers of a size; a step is read before the one after the next is launched, so its copy is long over."""


class _Size:
    """One size's inputs and its recording."""

    def __init__(self, size: int, spare: int, device: torch.device) -> None:
        padding = np.zeros((5, size), np.int64)
        padding[_PLACE], padding[_SLOT] = spare, -1
        self.padding: npt.NDArray[np.int64] = padding
        hosts = [torch.from_numpy(padding.copy()) for _ in range(_TURNS)]
        self._hosts = hosts if device.type == "cpu" else [host.pin_memory() for host in hosts]
        self.inputs = self._hosts[0].to(device, copy=True)
        self.replay: Launch | None = None

    def send(self, columns: npt.NDArray[np.int64]) -> None:
        """The rows of a batch; the others become padding."""
        self._hosts.append(self._hosts.pop(0))
        host, count = self._hosts[0].numpy(), columns.shape[1]
        host[:, :count] = columns
        host[:, count:] = self.padding[:, count:]
        self.inputs.copy_(self._hosts[0], non_blocking=True)


class CapturedSteps:
    """All sizes over one model and one pool of pages. Calls from the thread that launches its steps."""

    def __init__(
        self,
        model: Transformer,
        kv: PagedKv,
        ops: DeviceOps,
        graphs: Graphs,
        *,
        max_sequences: int,
        last: torch.Tensor,
        clock: Clock | None = None,
    ) -> None:
        """
        Args:
            model: of the family that `ops` is of.
            kv: its pages.
            ops: the device's.
            graphs: what records.
            max_sequences: in one step.
            last: [max_sequences + 1] int64: each place's last token, the spare one's included.
            clock: to say how long it all took.
        """
        self._model, self._kv, self._ops, self._graphs, self._last = model, kv, ops, graphs, last
        self._clock = clock or SystemClock()
        block_tokens, device = kv.shape.block_tokens, model.torch_device
        most = min(model.config.max_model_tokens, kv.num_blocks * block_tokens)
        self.width = -(-most // block_tokens)
        """Blocks of a table."""
        sizes = graph_sizes.sizes(max_sequences)
        self._most_tokens = {size: graph_sizes.most_tokens(size, most, kv.num_blocks * block_tokens) for size in sizes}
        self._spare = max_sequences
        self._tables = torch.zeros(max_sequences + 1, self.width, dtype=torch.int32, device=device)
        self._logits = torch.zeros(sizes[-1], model.config.vocab_size, dtype=torch.float32, device=device)
        self._drawn = torch.zeros(sizes[-1], dtype=torch.int64, device=device)
        self._sizes: dict[int, _Size] = {}
        self._waiting = list(sizes)
        """Not recorded yet; the largest is next, since the others then fit into its memory."""
        self._seconds = 0.0
        bound = graph_sizes.memory(
            model.config,
            sizes,
            value_bytes=model.torch_dtype.itemsize,
            tokens=self._most_tokens[sizes[-1]],
            width=self.width,
        )
        self.most_bytes = bound.most_bytes
        """Memory that it takes at most, beside weights and pages."""

    @property
    def is_waiting(self) -> bool:
        """Whether sizes are left to record."""
        return bool(self._waiting)

    @property
    def ready(self) -> tuple[int, ...]:
        """Sizes that are recorded."""
        return tuple(sorted(self._sizes))

    def capture_next(self) -> None:
        """Record one more size, the largest that is not yet, if any is left."""
        if not self._waiting:
            return
        begun = self._clock.monotonic()
        size = self._waiting.pop()
        made = _Size(size, self._spare, self._model.torch_device)
        try:
            made.replay = self._graphs.capture(lambda: self._launch(size, made.inputs))
        except Exception as error:  # whatever the compiler or the driver say: the steps run as they are
            _log.warning("decode steps of %d rows and fewer are not captured: %s", size, error)
            self._waiting.clear()
            return
        self._sizes[size] = made
        self._seconds += self._clock.monotonic() - begun
        if not self._waiting:
            _log.info(
                "decode steps of up to %d rows are captured in %d sizes: %.1f s, at most %d MiB",
                max(self._sizes), len(self._sizes), self._seconds, self.most_bytes >> 20,
            )  # fmt: skip

    def size_for(self, scheduled: Sequence[ScheduledSequence]) -> int | None:
        """The recorded size that a step can take; `None`: it must run as it is."""
        if any(s.num_scheduled != 1 for s in scheduled):
            return None
        if not any(s.samples for s in scheduled):  # nobody would wait for it, and its inputs' buffers are few
            return None
        size = graph_sizes.fit(len(scheduled), self._sizes)
        longest = max(s.num_computed for s in scheduled) + 1
        return None if size is None or longest > self._most_tokens[size] else size

    def run(
        self, size: int, scheduled: Sequence[ScheduledSequence], numbers: Sequence[int], places: Places
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch a step of one token each.

        Args:
            size: what `size_for` said.
            scheduled: the step's.
            numbers: their places.
            places: whose these are.

        Returns:
            Logits [size, vocabulary] and [size] most likely tokens, the batch's first. They stand until the next step.

        Raises:
            InvariantBroken: a sequence has fewer pages or tokens than the step needs.
        """
        block_tokens = self._kv.shape.block_tokens
        positions = [s.num_computed for s in scheduled]
        needed = [position // block_tokens + 1 for position in positions]
        here = [places.is_drawn_here(s) for s in scheduled]
        check_room(scheduled, needed, on_device=here)
        writes = places.changes(scheduled, needed)
        if writes.cells:
            cells = np.array((writes.cells, writes.blocks), np.int64)
            sent = to_device(torch.from_numpy(cells), self._model.torch_device)
            self._tables.view(-1).scatter_(0, sent[0], sent[1].to(torch.int32))
        given = [
            _FROM_PLACE if is_here else s.token_ids[p] for s, p, is_here in zip(scheduled, positions, here, strict=True)
        ]
        slots = slots_of(scheduled, positions, block_tokens)
        contexts = [p + 1 for p in positions]
        taken = self._sizes[size]
        taken.send(np.array((given, numbers, positions, contexts, slots), np.int64))
        assert taken.replay is not None
        taken.replay()
        return self._logits[:size], self._drawn[:size]

    def _launch(self, size: int, inputs: torch.Tensor) -> None:
        """What is recorded: no number in it comes from the host but for sizes."""
        model, pages = self._model, self._kv.pages
        given, places, positions, contexts, slots = inputs.unbind()
        tokens = torch.where(given < 0, self._last.index_select(0, places).clamp_min(0), given)
        rows = SingleRows(self._tables, places, contexts, self._most_tokens[size])
        plan = self._ops.plan_rows(rows, pages, model.config.num_heads)
        hidden = model.pass_through(Rows(tokens, positions, slots), pages, plan)
        model.logits_into(self._logits[:size], hidden)
        drawn = self._drawn[:size]
        drawn.copy_(most_likely(self._logits[:size]))
        self._last.scatter_(0, places, drawn)
