"""Steps with prompts whose launches are recorded between attentions: these differ from step to step, the rest does not.

    tokens, positions, slots          a size's own memory, filled up with padding
    enter ─► attend 0 ─► leave 0 ─► attend 1 ─► .. ─► leave L-1          recorded but for `attend`, by number of rows
          q           seen                                               memory of all sizes

What `attend` needs of the host, who belongs together over which pages, is planned anew for each step and launched as if
nothing were recorded. Padding is not among its rows; its slot is -1.
"""

import logging
from collections.abc import Sequence

import torch

from kvferry.engine.cache import PagedKv
from kvferry.engine.device_batch import DeviceBatch
from kvferry.engine.gpu import graph_sizes
from kvferry.engine.gpu.graphs import Graphs, Launch
from kvferry.engine.models.transformer import Passage, Rows, Transformer

_log = logging.getLogger(__name__)


class _Size:
    """One size's inputs and recordings."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.inputs = torch.zeros(3, size, dtype=torch.int64, device=device)
        self.inputs[2].fill_(-1)
        self.passage: Passage | None = None
        """As the first piece left it."""
        self.pieces: list[Launch] = []


class CapturedPieces:
    """All sizes over one model and one pool of pages. Calls from the thread that launches its steps."""

    def __init__(self, model: Transformer, kv: PagedKv, graphs: Graphs, rows: Sequence[int]) -> None:
        """
        Args:
            model: what computes.
            kv: its pages.
            graphs: what records.
            rows: sizes, ascending, at least one.
        """
        self._model, self._kv, self._graphs = model, kv, graphs
        self._waiting = list(rows)
        """Not recorded in full yet; the largest is next."""
        self._sizes: dict[int, _Size] = {}
        config, most, device = model.config, rows[-1], model.torch_device
        self._under_way = _Size(most, device)
        heads = config.num_heads + 2 * config.num_kv_heads
        self._qkv = torch.zeros(most, heads, config.head_dim, dtype=model.torch_dtype, device=device)
        self._seen = torch.zeros(most, config.num_heads * config.head_dim, dtype=model.torch_dtype, device=device)
        self.most_bytes = graph_sizes.piece_bytes(config, rows, value_bytes=model.torch_dtype.itemsize)
        """Memory that it takes at most, beside weights and pages."""

    @property
    def is_waiting(self) -> bool:
        """Whether pieces are left to record."""
        return bool(self._waiting)

    @property
    def ready(self) -> tuple[int, ...]:
        """Sizes that are recorded in full."""
        return tuple(sorted(self._sizes))

    def capture_next(self) -> None:
        """Record one more piece, if any is left."""
        if not self._waiting:
            return
        size, made = self._waiting[-1], self._under_way
        index = len(made.pieces)
        try:
            made.pieces.append(self._graphs.capture(lambda: self._launch(size, made, index)))
        except Exception as error:  # whatever the compiler or the driver say: the steps run as they are
            _log.warning("steps with prompts of %d rows and fewer are not captured: %s", size, error)
            self._waiting.clear()
            return
        if len(made.pieces) <= self._model.config.num_layers:
            return
        self._sizes[self._waiting.pop()] = made
        if self._waiting:
            self._under_way = _Size(self._waiting[-1], self._model.torch_device)
        else:
            _log.info(
                "steps with prompts of up to %d rows are captured between attentions in %d sizes, at most %d MiB",
                max(self._sizes), len(self._sizes), self.most_bytes >> 20,
            )  # fmt: skip

    def size_for(self, num_rows: int) -> int | None:
        """The recorded size that a step can take; `None`: it must run as it is."""
        return graph_sizes.fit(num_rows, self._sizes)

    def run(self, size: int, batch: DeviceBatch) -> torch.Tensor:
        """Launch a step: `Transformer.forward`, by pieces. What it returns stands until the next step."""
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
        """One piece: the first, or what follows attention `index - 1`."""
        if index == 0:
            made.passage, qkv = self._model.enter(Rows(*made.inputs.unbind()), self._kv.pages)
            self._qkv[:size].copy_(qkv)
            return
        assert made.passage is not None
        left = self._model.leave(index - 1, self._seen[:size], made.passage)
        if index < self._model.config.num_layers:
            self._qkv[:size].copy_(left)
