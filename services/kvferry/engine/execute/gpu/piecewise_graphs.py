"""Piecewise graph capture of steps with prefill: all launches between two attention layers are captured, but attention
is not.

    tokens, positions, slots          static memory per batch size, filled up with padding
    enter ─► attend 0 ─► leave 0 ─► attend 1 ─► .. ─► leave L-1          captured except `attend`, by number of rows
          q           seen                                               memory shared by all batch sizes

The attention plan (rows per sequence, block tables) is made for each step, and attention is launched eagerly. It skips
padding rows; their slot is -1.
"""

import logging
from collections.abc import Sequence

import torch

from kvferry.engine.execute.gpu.graphs import Graphs, Launch
from kvferry.engine.execute.models.transformer import ForwardState, Rows, Transformer
from kvferry.engine.execute.tensors.device_batch import DeviceBatch
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.schedule.step import graph_sizes

_log = logging.getLogger(__name__)


class _Size:
    """Static inputs and captured pieces of one captured batch size."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.inputs = torch.zeros(3, size, dtype=torch.int64, device=device)
        self.inputs[2].fill_(-1)
        self.passage: ForwardState | None = None
        """Forward state returned by the first piece; holds the inputs and outputs of the other pieces."""
        self.pieces: list[Launch] = []


class PiecewiseGraphs:
    """Captured pieces of all batch sizes for one model and its pages. Call it on the thread that launches steps."""

    def __init__(self, model: Transformer, kv: PagedKv, graphs: Graphs, rows: Sequence[int]) -> None:
        """
        Args:
            model: the model.
            kv: its pages.
            graphs: captures launches.
            rows: batch sizes to capture, in rows, ascending; not empty.
        """
        self._model, self._kv, self._graphs = model, kv, graphs
        self._waiting = list(rows)
        """Batch sizes not yet completely captured; the largest is captured next."""
        self._sizes: dict[int, _Size] = {}
        config, max_rows, device = model.config, rows[-1], model.torch_device
        self._under_way = _Size(max_rows, device)
        shape = max_rows, config.projected_heads, config.head_dim
        self._qkv = torch.zeros(shape, dtype=model.torch_dtype, device=device)
        self._seen = torch.zeros(max_rows, config.attended_size, dtype=model.torch_dtype, device=device)
        self.max_bytes = graph_sizes.piece_bytes(config, rows, value_bytes=model.torch_dtype.itemsize)
        """Upper bound of the memory of all captured pieces in bytes, without weights and pages."""

    @property
    def is_waiting(self) -> bool:
        """Whether any piece has not been captured yet."""
        return bool(self._waiting)

    @property
    def ready(self) -> tuple[int, ...]:
        """Completely captured batch sizes, in rows."""
        return tuple(sorted(self._sizes))

    def capture_next(self) -> None:
        """Capture one more piece; no effect if all are captured."""
        if not self._waiting:
            return
        size, made = self._waiting[-1], self._under_way
        index = len(made.pieces)
        try:
            made.pieces.append(self._graphs.capture(lambda: self._launch(size, made, index)))
        except Exception as error:  # compiler or driver error: steps run eagerly
            _log.warning("cannot capture prefill steps of %d rows or fewer; they run eagerly: %s", size, error)
            self._waiting.clear()
            return
        if len(made.pieces) <= self._model.config.num_layers:
            return
        self._sizes[self._waiting.pop()] = made
        if self._waiting:
            self._under_way = _Size(self._waiting[-1], self._model.torch_device)
        else:
            _log.info(
                "prefill steps of up to %d rows are captured piecewise in %d sizes, at most %d MiB",
                max(self._sizes), len(self._sizes), self.max_bytes >> 20,
            )  # fmt: skip

    def size_for(self, num_rows: int) -> int | None:
        """Return the captured batch size for a step of `num_rows` rows; `None` if the step must run eagerly."""
        return graph_sizes.fit(num_rows, self._sizes)

    def run(self, size: int, batch: DeviceBatch) -> torch.Tensor:
        """Launch a step: `Transformer.forward` as captured pieces and eager attention.

        Args:
            size: captured batch size in rows, a result of `size_for`.
            batch: the step, with at most `size` rows.

        Returns:
            The residual after the last layer, one row for each row of the batch; valid until the next step.
        """
        model, pages, taken = self._model, self._kv.pages, self._sizes[size]
        count = len(batch.token_ids)
        for row, given in zip(taken.inputs, (batch.token_ids, batch.positions, batch.attention.slots), strict=True):
            row[:count].copy_(given)
        taken.inputs[2, count:].fill_(-1)
        plan = model.ops.plan_attention(batch.attention, pages, model.config.num_heads)
        taken.pieces[0]()
        for index, piece in enumerate(taken.pieces[1:]):
            self._seen[:count].copy_(model.attend(index, self._qkv[:count], pages, plan))
            piece()
        assert taken.passage is not None
        return taken.passage.residual[:count]

    def _launch(self, size: int, made: _Size, index: int) -> None:
        """Launch one piece: the first, or the one after attention `index - 1`."""
        if index == 0:
            token_ids, positions, slots = made.inputs.unbind()
            made.passage, qkv = self._model.enter(Rows(token_ids, positions, slots), self._kv.pages)
            self._qkv[:size].copy_(qkv)
            return
        assert made.passage is not None
        left = self._model.leave(index - 1, self._seen[:size], made.passage)
        if index < self._model.config.num_layers:
            self._qkv[:size].copy_(left)
