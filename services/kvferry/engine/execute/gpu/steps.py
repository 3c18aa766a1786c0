"""Full graph capture of decode steps: one captured graph per batch size, over static inputs.

    host       [5, size] pinned ──one copy──► [5, size]     given token, batch slot, position, context, slot of each row
    changed blocks ──if any──────────────────► tables       block tables of the running sequences, by batch slot

With layer groups, each group has its own context lengths, slots and block tables; a group's context lengths count from
the first block in its tables.

    replay     tokens = given, or the batch slot's last token ─► model ─► logits ─► argmax ─► last token of batch slot

Rows beyond the batch are padding: they have the spare batch slot, context 0, so that attention returns zeros, and KV
slot -1, so that they write no KV.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from kvferry.core.clock import Clock, SystemClock
from kvferry.engine.execute.gpu.draws import most_likely
from kvferry.engine.execute.gpu.graphs import Graphs, Launch
from kvferry.engine.execute.models.group_plans import GroupPlans
from kvferry.engine.execute.models.transformer import Rows, Transformer
from kvferry.engine.execute.tensors.batch import check_room, slots_of
from kvferry.engine.execute.tensors.device_batch import to_device
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.schedule.step import graph_sizes
from kvferry.engine.schedule.step.adapter_slots import NO_SLOT
from kvferry.engine.schedule.step.batch_slots import BatchSlots, num_passed
from kvferry.engine.schedule.step.step import ScheduledSequence
from kvferry.kernels.batch import SingleRows
from kvferry.kernels.ops import DeviceOps

_log = logging.getLogger(__name__)

_GIVEN, _PLACE, _POSITION, _CONTEXT, _SLOT = range(5)
"""Rows of the inputs. The context length and slot of each further layer group follow."""
_FROM_PLACE = -1
"""Value in the column of given tokens: the row's input is the last token sampled in its batch slot."""
_TURNS = 2
"""Number of host buffers per captured batch size. A step's result is read before the second step after it is launched,
so its buffer can be reused then."""


class _Size:
    """Static inputs and captured graph of one batch size."""

    def __init__(self, size: int, spare: int, device: torch.device, num_groups: int) -> None:
        padding = np.zeros((3 + 2 * num_groups, size), np.int64)
        padding[_PLACE], padding[_SLOT::2] = spare, -1
        self.padding: npt.NDArray[np.int64] = padding
        hosts = [torch.from_numpy(padding.copy()) for _ in range(_TURNS)]
        self._hosts = hosts if device.type == "cpu" else [host.pin_memory() for host in hosts]
        self.inputs = self._hosts[0].to(device, copy=True)
        self.replay: Launch | None = None

    def send(self, columns: npt.NDArray[np.int64]) -> None:
        """Copy the columns of a batch's rows; the other rows become padding."""
        self._hosts.append(self._hosts.pop(0))
        host, count = self._hosts[0].numpy(), columns.shape[1]
        host[:, :count] = columns
        host[:, count:] = self.padding[:, count:]
        self.inputs.copy_(self._hosts[0], non_blocking=True)


class CapturedSteps:
    """Captured steps of all batch sizes for one model and its pages. Call it on the thread that launches steps."""

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
            model: the model; its kernels belong to the same backend as `ops`.
            kv: the model's KV pages.
            ops: the device's kernels.
            graphs: captures launches.
            max_sequences: maximum number of sequences in a step.
            last: [max_sequences + 1] int64, last token of each batch slot including the spare slot.
            clock: measures the duration of all captures.
        """
        self._model, self._kv, self._ops, self._graphs, self._last = model, kv, ops, graphs, last
        self._clock = clock or SystemClock()
        block_tokens, device = kv.layout.block_tokens, model.torch_device
        max_context = min(model.config.max_model_tokens, kv.num_blocks * block_tokens)
        self.width = -(-max_context // block_tokens)
        """Number of blocks per row of the block tables."""
        sizes = graph_sizes.sizes(max_sequences)
        self._max_tokens = {
            size: graph_sizes.max_tokens(size, max_context, kv.num_blocks * block_tokens) for size in sizes
        }
        self._spare = max_sequences
        self._groups = kv.layout.groups
        self._tables = torch.zeros(
            len(self._groups.windows), max_sequences + 1, self.width, dtype=torch.int32, device=device
        )
        self._logits = torch.zeros(sizes[-1], model.config.vocab_size, dtype=torch.float32, device=device)
        self._drawn = torch.zeros(sizes[-1], dtype=torch.int64, device=device)
        self._sizes: dict[int, _Size] = {}
        self._waiting = list(sizes)
        """Batch sizes not yet captured, in rows. The largest is captured first, so that the smaller ones fit into its
        memory."""
        self._seconds = 0.0
        bound = graph_sizes.memory(
            model.config,
            sizes,
            value_bytes=model.torch_dtype.itemsize,
            tokens=self._max_tokens[sizes[-1]],
            width=self.width * len(self._groups.windows),
        )
        self.max_bytes = bound.max_bytes
        """Upper bound of the memory of all captured steps in bytes, without weights and pages."""

    @property
    def is_waiting(self) -> bool:
        """Whether any batch size has not been captured yet."""
        return bool(self._waiting)

    @property
    def ready(self) -> tuple[int, ...]:
        """Captured batch sizes, in rows."""
        return tuple(sorted(self._sizes))

    def capture_next(self) -> None:
        """Capture the largest remaining batch size, if any."""
        if not self._waiting:
            return
        begun = self._clock.monotonic()
        size = self._waiting.pop()
        made = _Size(size, self._spare, self._model.torch_device, len(self._groups.windows))
        try:
            made.replay = self._graphs.capture(lambda: self._launch(size, made.inputs))
        except Exception as error:  # compiler or driver error: steps run eagerly
            _log.warning("cannot capture decode steps of %d rows or fewer; they run eagerly: %s", size, error)
            self._waiting.clear()
            return
        self._sizes[size] = made
        self._seconds += self._clock.monotonic() - begun
        if not self._waiting:
            _log.info(
                "decode steps of up to %d rows are captured in %d sizes: %.1f s, at most %d MiB",
                max(self._sizes), len(self._sizes), self._seconds, self.max_bytes >> 20,
            )  # fmt: skip

    def size_for(self, scheduled: Sequence[ScheduledSequence]) -> int | None:
        """Return the captured batch size for a step; `None` if the step must run eagerly."""
        if any(
            s.num_scheduled != 1 or s.num_scored or s.pooled_positions or s.adapter_slot != NO_SLOT for s in scheduled
        ):
            return None
        # Without a sampled row the result is not read, so the step's buffers could be reused too early.
        if not any(s.num_sampled for s in scheduled):
            return None
        size = graph_sizes.fit(len(scheduled), self._sizes)
        longest = max(s.num_computed for s in scheduled) + 1
        return None if size is None or longest > self._max_tokens[size] else size

    def run(
        self, size: int, scheduled: Sequence[ScheduledSequence], numbers: Sequence[int], places: BatchSlots
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch a step of one token each.

        Args:
            size: captured batch size, from `size_for`.
            scheduled: the step's sequences.
            numbers: batch slot of each sequence.
            places: the assignment of batch slots.

        Returns:
            Logits [size, vocabulary] float32 and greedy tokens [size] int64, the batch's rows first; valid until the
            next step.

        Raises:
            InvariantBroken: a sequence has fewer pages or tokens than the step needs.
        """
        block_tokens = self._kv.layout.block_tokens
        positions = [s.num_computed for s in scheduled]
        needed = [position // block_tokens + 1 for position in positions]
        here = [places.is_drawn_here(s) for s in scheduled]
        check_room(scheduled, needed, on_device=here)
        groups = range(len(self._groups.windows))
        for group in groups:
            writes = places.changes(scheduled, needed, group)
            if writes.cells:
                cells = np.array((writes.cells, writes.blocks), np.int64)
                sent = to_device(torch.from_numpy(cells), self._model.torch_device)
                self._tables[group].view(-1).scatter_(0, sent[0], sent[1].to(torch.int32))
        given = [
            _FROM_PLACE if is_here else s.token_ids[p] for s, p, is_here in zip(scheduled, positions, here, strict=True)
        ]
        inputs = [given, numbers, positions]
        for group in groups:
            inputs.append(
                [p + 1 - num_passed(s, group) * block_tokens for s, p in zip(scheduled, positions, strict=True)]
            )
            inputs.append(slots_of(scheduled, positions, block_tokens, group))
        taken = self._sizes[size]
        taken.send(np.array(inputs, np.int64))
        assert taken.replay is not None
        taken.replay()
        return self._logits[:size], self._drawn[:size]

    def _launch(self, size: int, inputs: torch.Tensor) -> None:
        """Launch the kernels of a captured step; the kernels read no host memory."""
        model, pages = self._model, self._kv.pages
        given, places, positions, *of_groups = inputs.unbind()
        tokens = torch.where(given < 0, self._last.index_select(0, places).clamp_min(0), given)
        contexts, slots = of_groups[::2], of_groups[1::2]
        plans = [
            self._ops.plan_rows(
                SingleRows(tables, places, context, self._max_tokens[size]), pages, model.config.num_heads
            )
            for tables, context in zip(self._tables, contexts, strict=True)
        ]
        rows, plan = Rows(tokens, positions, slots[0]), plans[0]
        if self._kv.layout.windows:
            plan = GroupPlans(self._groups.places, tuple(plans), tuple(slots))
            rows = replace(rows, groups=plan)
        hidden = model.pass_through(rows, pages, plan)
        model.logits_into(self._logits[:size], hidden)
        drawn = self._drawn[:size]
        drawn.copy_(most_likely(self._logits[:size]))
        self._last.scatter_(0, places, drawn)
