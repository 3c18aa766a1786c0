"""Decoder on the compiled CPU kernels, one native call per step; computes the same function as `transformer`."""

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.core.dtypes import FLOAT32
from kvferry.core.errors import UsageError
from kvferry.engine.execute.models.compiled_adapter import CompiledAdapter, pack_adapter
from kvferry.engine.execute.models.compiled_latent import latent_sizes
from kvferry.engine.execute.models.compiled_loader import ArenaLoader
from kvferry.engine.execute.models.model import LATENT_TAKES_NO_ADAPTERS, Logits
from kvferry.engine.execute.models.share_tensors import ShareTensors
from kvferry.engine.execute.tensors.batch import StepBatch
from kvferry.engine.execute.tensors.device import CPU
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.kernels import compiled
from kvferry.weights.adapters.adapter_folder import Adapter
from kvferry.weights.config import Activation, ModelConfig
from kvferry.weights.shares import Share, config_of_share
from kvferry.weights.tensors import TensorSource, check_shapes

if TYPE_CHECKING:
    from kvferry.kernels._cpu import Ranks, Runner

_GATES = {Activation.SILU: 0, Activation.GELU_TANH: 1, Activation.CLAMPED_SWIGLU: 2}
_NO_HIDDEN = np.empty((0, 0), np.float32)
_NO_TAPS = np.empty(0, np.int64)
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RankPlace:
    """A process's place among the ranks that compute a model together."""

    share: Share
    ranks: "Ranks"


class CompiledTransformer:
    """A model on the compiled CPU kernels. Thread-safe (calls are serialized), so engines of one process can share
    it."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: TensorSource,
        *,
        dtype: str,
        form: str,
        level: str,
        threads: int,
        rounds_inputs: bool = False,
        place: "RankPlace | None" = None,
    ) -> None:
        """
        Args:
            config: the model's shape.
            tensors: the model's weights.
            dtype: data type of the pages: float32, bfloat16, int8 or fp8.
            form: weight format: `shipped`, `f32`, `f16` or `bf16`.
            level: kernel level, one of `compiled.levels()`.
            threads: number of compute threads.
            rounds_inputs: round inputs to 8 bits where weights are quantized.
            place: this process's place among the ranks that compute the model together; `None` if it computes the whole
                model.

        Raises:
            ModelFileError: the weights do not match the configuration, or are not finite.
            UsageError: `rounds_inputs` is set, but the model has no quantized weights; or quantized weights cannot be
                divided among the ranks.
        """
        check_shapes(config, tensors.shapes(), f"model {config.name!r}")
        self.config = config
        self.dtype = dtype
        self.device = CPU
        self.kernels = f"compiled-{level}"
        self.place = place
        own = config
        if place is not None:
            own, tensors = config_of_share(config, place.share), ShareTensors(tensors, config, place.share)
        loader = ArenaLoader(own, tensors, form)
        parts, layers = loader.load()
        tensors.release()  # all tensors were copied; mapped pages of the file would count as memory of this process
        if rounds_inputs and not loader.has_codes:
            raise UsageError(
                "numerics=fast needs quantized weights (4 to 8 bits), but this model has none; use exact",
                field="numerics",
            )
        self.weight_bytes = loader.num_bytes - loader.idle_bytes
        """See `model.Model.weight_bytes`."""
        self.rounds_inputs = rounds_inputs
        self._own = threading.local()
        self.level, self.form = level, form
        """Kernel level, and weight format: `shipped`, `f32`, `f16` or `bf16`."""
        self.input_bits = 8 if rounds_inputs else 32 if dtype == FLOAT32 else 16
        """Precision of inputs of quantized matrices."""
        self.pool = compiled.make_pool(threads)
        """Threads of the kernels; jobs are serialized."""
        self.embedding, self.head = loader.of_vocabulary
        """Packed embedding and output head, each [vocabulary, hidden]."""
        self._runner = compiled.make_runner(
            native_shape(config, self.input_bits, place=place),
            parts,
            layers,
            level,
            self.pool,
            None if place is None else place.ranks,
        )

    def compute(self, batch: StepBatch, kv: PagedKv) -> Logits:
        """See `model.Model.compute`."""
        return self.compute_into(batch, kv, self._room_for(len(batch.sample_rows)))

    def compute_into(self, batch: StepBatch, kv: PagedKv, room: "LogitRoom") -> Logits:
        """Compute a step with given memory for the logits, which ranks share.

        Args:
            batch: see `model.Model.compute`.
            kv: see `model.Model.compute`.
            room: memory for the rows that are sampled.
        """
        num_hidden = len(batch.hidden_rows)
        width, num_taps = self.config.hidden_size, len(batch.tapped_layers)
        hidden = np.empty((num_hidden, width), np.float32) if num_hidden else _NO_HIDDEN
        tapped = np.empty((len(batch.token_ids), num_taps * width), np.float32) if num_taps else _NO_HIDDEN
        outputs = StepOutputs(room.values, room.greedy, room.finite, hidden, tapped)
        run_step(self._runner, batch, kv, self.dtype, outputs)
        finite = room.finite.view(bool).tolist()
        greedy = room.greedy.tolist()
        return Logits(room.values, greedy, finite, hidden if num_hidden else None, tapped if num_taps else None)

    @property
    def has_layer_groups(self) -> bool:
        """See `model.Model.has_layer_groups`."""
        return self.config.latent is None

    @property
    def why_no_adapters(self) -> str | None:
        """See `model.Model.why_no_adapters`."""
        return None if self.config.latent is None else LATENT_TAKES_NO_ADAPTERS

    def pack_adapter(self, adapter: Adapter) -> CompiledAdapter:
        """See `model.Model.pack_adapter`."""
        return pack_adapter(adapter, self._runner, self.config.num_layers, is_bf16=self.dtype != FLOAT32)

    def _room_for(self, rows: int) -> "LogitRoom":
        """Return scratch memory for `rows` rows. Each thread reuses its memory for all steps, since new memory would
        cause a page fault per 4 KiB."""
        room: LogitRoom | None = getattr(self._own, "room", None)
        if room is None or len(room.memory) < rows:
            room = LogitRoom.of(np.empty((rows, self.config.vocab_size), np.float32), rows)
        elif len(room.values) != rows:
            room = LogitRoom.of(room.memory, rows)
        self._own.room = room
        return room

    def phase_seconds(self) -> dict[str, float]:
        """Return the time spent in each phase since the last call, in seconds, summed over threads; the first call
        starts the measurement."""
        return self._runner.phase_seconds()


@dataclass(frozen=True, slots=True, eq=False)
class LogitRoom:
    """Output buffers of a step; views of the memory are created once per number of rows."""

    memory: Floats
    """Memory for logits, [largest number of rows so far, vocabulary]."""
    values: Floats
    """[rows, vocabulary], a view of `memory`: logits of the current step."""
    greedy: Ints
    finite: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, memory: Floats, rows: int) -> "LogitRoom":
        """Create views of the first `rows` rows of `memory`."""
        return cls(memory, memory[:rows], np.empty(rows, np.int64), np.empty(rows, np.uint8))


class StepOutputs(NamedTuple):
    """Memory for the results of a step with T rows, of which S are sampled and H return hidden states."""

    logits: Floats
    """[S, vocabulary]."""
    greedy: Ints
    """[S]."""
    finite: npt.NDArray[np.uint8]
    """[S]."""
    hidden: Floats = _NO_HIDDEN
    """[H, hidden]."""
    tapped: Floats = _NO_HIDDEN
    """[T, layers * hidden]."""


class VectorRows(NamedTuple):
    """Rows of a step that are vectors instead of tokens."""

    residuals: Floats = _NO_HIDDEN
    """[T, hidden]: residual stream before the first layer."""
    inputs: Floats = _NO_HIDDEN
    """[T, inputs]: inputs of the first layer's attention."""


def run_step(
    runner: "Runner",
    batch: StepBatch,
    kv: PagedKv,
    dtype: str,
    out: StepOutputs,
    vectors: VectorRows = VectorRows(),  # noqa: B008  immutable
) -> None:
    """Compute a step of a model or of a head.

    Args:
        runner: its native runner.
        batch: the rows.
        kv: the pages.
        dtype: data type of the pages.
        out: memory for the results.
        vectors: the rows, if they are vectors; by default, rows are the tokens of the batch.
    """
    runner.step(
        batch.token_ids,
        batch.positions,
        batch.slots,
        batch.queries,
        batch.contexts,
        batch.block_tables,
        batch.sample_rows,
        kv.address,
        kv.num_blocks,
        kv.layout.block_tokens,
        dtype,
        out.logits,
        out.greedy,
        out.finite,
        batch.hidden_rows,
        out.hidden,
        batch.adapter_of_row,
        [adapter.native for adapter in batch.adapters if isinstance(adapter, CompiledAdapter)],
        np.array(batch.tapped_layers, np.int64) if batch.tapped_layers else _NO_TAPS,
        out.tapped,
        vectors.residuals,
        vectors.inputs,
        kv.places,
        kv.page_layers,
        batch.further_slots,
        batch.further_tables,
        batch.trees,
        batch.paths,
    )


def native_shape(
    config: ModelConfig, input_bits: int, inputs: int = 0, place: "RankPlace | None" = None
) -> dict[str, int | float]:
    """Return the numbers that describe a model, or a head, to the compiled kernels.

    Args:
        config: the model's shape.
        input_bits: precision of inputs of quantized matrices.
        inputs: inputs of the attention of the first layer, if rows are vectors.
        place: the rank whose share of the model is described; `None` for the whole model.
    """
    own, kv_heads, tokens = config, range(config.num_kv_heads), range(config.vocab_size)
    if place is not None:
        own = config_of_share(config, place.share)
        kv_heads, tokens = place.share.kv_heads_of(config.num_kv_heads), place.share.tokens_of(config.vocab_size)
    return {
        "inputs": inputs or config.hidden_size,
        "hidden": config.hidden_size,
        "intermediate": own.intermediate_size,
        "heads": own.num_heads,
        "kv_heads": own.num_kv_heads,
        "first_kv_head": kv_heads.start,
        "page_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": own.vocab_size,
        "first_token": tokens.start,
        "all_tokens": config.vocab_size,
        "max_tokens": config.max_model_tokens,
        "epsilon": config.rms_norm_eps,
        "scale": config.score_scale,
        "attention_soft_cap": config.attention_soft_cap or 0.0,
        "logit_soft_cap": config.logit_soft_cap or 0.0,
        "embedding_scale": config.embedding_scale,
        "residual_scale": config.residual_scale,
        "gate": _GATES[config.activation],
        "swiglu_alpha": config.swiglu_alpha,
        "swiglu_limit": config.swiglu_limit,
        "input_bits": input_bits,
        **latent_sizes(config.latent),
    }
