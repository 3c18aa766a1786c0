"""Heads on the compiled CPU kernels, on the threads of the target model.

The weights of a head are rounded to 8 bits if the target model keeps its own in the file's format: they are read once
per draft token, and rounding errors in a draft only cost time. Otherwise they have the target model's format.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvferry.core.dtypes import activation_dtype
from kvferry.engine.execute.drafts.head_models import Floats, Predicted, predicted, rms_norm
from kvferry.engine.execute.models.compiled import CompiledTransformer, StepOutputs, VectorRows, native_shape, run_step
from kvferry.engine.execute.models.compiled_loader import ArenaLoader
from kvferry.engine.execute.tensors.batch import StepBatch
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.kernels import compiled
from kvferry.weights.config import ModelConfig
from kvferry.weights.heads.eagle_head import EMBEDDING_NORM, FC, FC_BIAS, HEAD, HIDDEN_NORM, NORM, EagleHead
from kvferry.weights.heads.head_files import HeadTensors
from kvferry.weights.heads.medusa_head import MedusaHeads
from kvferry.weights.quantized.representation import BLOCK, Kept
from kvferry.weights.tensors import Stored

_SHIPPED = "shipped"


class Codes8Tensors(HeadTensors):
    """The tensors of a head; matrices whose rows consist of whole blocks are quantized to 8 bits with a float16 scale
    per 32 inputs.
    """

    def __init__(self, tensors: HeadTensors) -> None:
        super().__init__(tensors.path, tensors._found)

    def stored(self, name: str) -> Stored:
        """Return a quantized matrix, if its rows consist of whole blocks."""
        rows, cols = self.shapes()[name]
        if cols % BLOCK:
            return super().stored(name)
        return Stored.later(Kept.CODES8.type_id, lambda: codes8(self.read(name)), rows)


def codes8(values: Floats) -> npt.NDArray[np.uint8]:
    """Quantize a matrix [rows, cols], whose rows consist of whole blocks; return the bytes."""
    blocks = values.reshape(-1, BLOCK)
    scales = np.minimum(np.abs(blocks).max(axis=1, keepdims=True) / 127.0, np.finfo(np.float16).max).astype("<f2")
    wide = scales.astype(np.float32)
    codes = np.rint(np.divide(blocks, wide, out=np.zeros_like(blocks), where=wide > 0))
    whole = np.empty((len(blocks), 2 + BLOCK), np.uint8)
    whole[:, :2] = scales.view(np.uint8)
    whole[:, 2:] = np.clip(codes, -127, 127).astype(np.int8).view(np.uint8)
    return whole.reshape(-1)


def _loader(tensors: HeadTensors, model: CompiledTransformer, config: ModelConfig) -> ArenaLoader:
    return ArenaLoader(config, Codes8Tensors(tensors) if model.form == _SHIPPED else tensors, model.form)


class CompiledEagle:
    """An EAGLE head; see `head_models.EagleModel`. Call it from one thread at a time."""

    def __init__(self, head: EagleHead, model: CompiledTransformer) -> None:
        """
        Args:
            head: the head.
            model: the target model.

        Raises:
            ModelFileError: a weight is not finite in the format of the kernels.
        """
        self.config = config = head.config
        self.dtype = activation_dtype(model.dtype)
        self._head, self._model = head, model
        hidden, tensors = config.hidden_size, head.tensors
        inputs = 2 * hidden if head.is_fused else hidden
        loader = _loader(tensors, model, config)
        layer = loader.layer(0, width=inputs)
        fc_inputs = (len(head.layers) or 2) * hidden
        self._fc = loader.matrix((FC,), fc_inputs, bias=(FC_BIAS,) if FC_BIAS in tensors else ())
        output = loader.matrix((HEAD,), hidden) if head.is_fused else model.head
        loader.pack()
        self.weight_bytes = loader.num_bytes + (0 if head.is_fused else model.head.num_bytes)
        """Bytes of the weights that a draft token reads."""
        names = (EMBEDDING_NORM, HIDDEN_NORM, NORM) if head.is_fused else ()
        self._norms = [tensors.read(name) for name in names]
        norm = self._norms[2] if self._norms else None
        self._runner = compiled.make_runner(
            native_shape(config, model.input_bits, inputs),
            {"embedding": None, "head": output, "final_norm": None, "head_norm": norm},
            [layer],
            model.level,
            model.pool,
        )

    def fuse(self, hidden: Floats) -> Floats:
        """See `EagleModel.fuse`."""
        return self._times_fc(hidden) if self._head.is_fused else hidden

    def compute(self, batch: StepBatch, hidden: Floats, kv: PagedKv, width: int) -> tuple[Predicted, Floats]:
        """See `EagleModel.compute`."""
        config, samples = self.config, len(batch.sample_rows)
        embedded = np.empty((len(batch.token_ids), config.hidden_size), np.float32)
        compiled.dequantize(self._model.level, self._model.embedding, batch.token_ids, embedded)
        if self._head.is_fused:
            of_embedding, of_hidden, _ = self._norms
            epsilon, residuals = config.rms_norm_eps, hidden
            pair = (rms_norm(embedded, of_embedding, epsilon), rms_norm(hidden, of_hidden, epsilon))
            inputs = np.concatenate(pair, axis=1)
        else:
            inputs = residuals = self._times_fc(np.concatenate((embedded, hidden), axis=1))
        logits = np.empty((samples, config.vocab_size), np.float32)
        after = np.empty((samples, config.hidden_size), np.float32)
        outputs = StepOutputs(logits, np.empty(samples, np.int64), np.empty(samples, np.uint8), after)
        rows = VectorRows(np.ascontiguousarray(residuals), inputs)
        run_step(self._runner, replace(batch, hidden_rows=batch.sample_rows), kv, self.dtype, outputs, rows)
        return predicted(logits, self._head.token_ids, width), after

    def _times_fc(self, x: Floats) -> Floats:
        out = np.empty((len(x), self.config.hidden_size), np.float32)
        compiled.product(self._model.pool, self._model.level, self._fc, x, out, self._model.input_bits)
        return out


class CompiledMedusa:
    """Medusa heads; see `head_models.MedusaModel`. Call it from one thread at a time."""

    def __init__(self, heads: MedusaHeads, model: CompiledTransformer) -> None:
        """
        Args:
            heads: the heads.
            model: the target model.

        Raises:
            ModelFileError: a weight is not finite in the format of the kernels.
        """
        self.num_heads, self._model = heads.num_heads, model
        loader, hidden = _loader(heads.tensors, model, model.config), model.config.hidden_size
        self._blocks = [
            [
                loader.matrix((weight,), hidden, bias=(bias,))
                for weight, bias in (heads.block(head, block) for block in range(heads.num_blocks))
            ]
            for head in range(heads.num_heads)
        ]
        self._outputs = [loader.matrix((heads.output(head),), hidden) for head in range(heads.num_heads)]
        loader.pack()
        self.weight_bytes = loader.num_bytes // heads.num_heads
        """Bytes of the weights that a draft token reads."""

    def predict(self, head: int, hidden: Floats, width: int) -> Predicted:
        """See `MedusaModel.predict`."""
        model, x = self._model, hidden.copy()
        for block in self._blocks[head]:
            out = np.empty_like(x)
            compiled.product(model.pool, model.level, block, x, out, model.input_bits)
            # For a large negative value the exponential overflows to infinity, and SiLU is 0. Values that are not
            # finite propose no token.
            with np.errstate(over="ignore", invalid="ignore"):
                x += out / (1.0 + np.exp(-out))
        logits = np.empty((len(x), model.config.vocab_size), np.float32)
        compiled.product(model.pool, model.level, self._outputs[head], x, logits, model.input_bits)
        return predicted(logits, None, width)
