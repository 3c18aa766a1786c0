"""Heads on the torch kernels of the target model, in the data type of that model; CPU only."""

import torch
from torch.nn.functional import silu

from kvferry.core.dtypes import activation_dtype
from kvferry.engine.execute.drafts.head_models import Floats, Predicted, predicted
from kvferry.engine.execute.models.transformer import Rows, Transformer
from kvferry.engine.execute.models.weights import LayerWeights, Mlp, Reader, Weights
from kvferry.engine.execute.tensors.batch import StepBatch
from kvferry.engine.execute.tensors.device_batch import DeviceBatch
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.weights.heads.eagle_head import EMBEDDING_NORM, FC, FC_BIAS, HEAD, HIDDEN_NORM, LAYER, NORM, EagleHead
from kvferry.weights.heads.medusa_head import MedusaHeads


class TorchEagle:
    """An EAGLE head; see `head_models.EagleModel`. Call it from one thread at a time."""

    @torch.inference_mode()
    def __init__(self, head: EagleHead, model: Transformer) -> None:
        """
        Args:
            head: the head.
            model: the target model.

        Raises:
            ModelFileError: a weight is not finite in the data type.
        """
        self.config, self.dtype = head.config, activation_dtype(model.dtype)
        self._head, self._model, tensors = head, model, head.tensors
        reader = Reader(tensors, model.ops, model.torch_dtype, model.torch_device)
        linear, attention = reader.linear, LAYER + "self_attn."
        bias = tuple(f"{attention}{x}_proj.bias" for x in "qkv") if head.config.qkv_bias else ()
        layer = LayerWeights(
            attention_norm=None,
            qkv=linear(*(f"{attention}{x}_proj.weight" for x in "qkv"), bias=bias),
            head_norms=None,
            whole_norms=None,
            output=linear(attention + "o_proj.weight"),
            sinks=None,
            attention_output_norm=None,
            mlp_norm=reader.tensor(LAYER + "post_attention_layernorm.weight"),
            mlp=Mlp(
                linear(LAYER + "mlp.gate_proj.weight", LAYER + "mlp.up_proj.weight"),
                linear(LAYER + "mlp.down_proj.weight"),
            ),
            mlp_output_norm=None,
        )
        self._fc = linear(FC, bias=(FC_BIAS,) if FC_BIAS in tensors else ())
        names = (EMBEDDING_NORM, HIDDEN_NORM, NORM) if head.is_fused else ()
        self._norms = [reader.tensor(name) for name in names]
        self._output = linear(HEAD) if head.is_fused else model.weights.head
        # The final norm is applied here, since the head returns hidden states before that norm.
        weights = Weights(model.weights.embedding, (layer,), model.weights.final_norm, self._output)
        self._layer = Transformer(head.config, weights, model.ops, dtype=model.torch_dtype)

    @torch.inference_mode()
    def fuse(self, hidden: Floats) -> Floats:
        """See `EagleModel.fuse`."""
        if not self._head.is_fused:
            return hidden
        fused: Floats = self._fc(self._tensor(hidden)).float().numpy()
        return fused

    @torch.inference_mode()
    def compute(self, batch: StepBatch, hidden: Floats, kv: PagedKv, width: int) -> tuple[Predicted, Floats]:
        """See `EagleModel.compute`."""
        model, layer, there = self._model, self._layer, DeviceBatch.of(batch, self._model.torch_device)
        embedded = model.ops.embedding(there.token_ids, model.weights.embedding)
        residual = self._tensor(hidden)
        epsilon = self.config.rms_norm_eps

        def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return model.ops.rms_norm(x, weight, epsilon)

        if self._head.is_fused:
            of_embedding, of_hidden, _ = self._norms
            inputs = torch.cat((norm(embedded, of_embedding), norm(residual, of_hidden)), dim=-1)
            residual = residual.clone()  # the layer adds to it in place
        else:
            residual = self._fc(torch.cat((embedded, residual), dim=-1))
            inputs = residual.clone()
        plan = model.ops.plan_attention(there.attention, kv.pages, self.config.num_heads)
        rows = Rows(there.token_ids, there.positions, there.attention.slots)
        passage, qkv = layer.enter_with(residual, inputs, rows, kv.pages)
        layer.leave(0, layer.attend(0, qkv, kv.pages, plan), passage)
        after = model.ops.gather_rows(passage.residual, there.sample_rows)
        logits = self._output(norm(after, self._norms[2]) if self._norms else after)
        return predicted(logits.float().numpy(), self._head.token_ids, width), after.float().numpy()

    def _tensor(self, values: Floats) -> torch.Tensor:
        return torch.tensor(values, dtype=self._model.torch_dtype)


class TorchMedusa:
    """Medusa heads; see `head_models.MedusaModel`. Call it from one thread at a time."""

    @torch.inference_mode()
    def __init__(self, heads: MedusaHeads, model: Transformer) -> None:
        """
        Args:
            heads: the heads.
            model: the target model.

        Raises:
            ModelFileError: a weight is not finite in the data type.
        """
        self.num_heads, self._dtype = heads.num_heads, model.torch_dtype
        reader = Reader(heads.tensors, model.ops, model.torch_dtype, model.torch_device)
        self._blocks = [
            [
                reader.linear(weight, bias=(bias,))
                for weight, bias in (heads.block(head, block) for block in range(heads.num_blocks))
            ]
            for head in range(heads.num_heads)
        ]
        self._outputs = [reader.linear(heads.output(head)) for head in range(heads.num_heads)]

    @torch.inference_mode()
    def predict(self, head: int, hidden: Floats, width: int) -> Predicted:
        """See `MedusaModel.predict`."""
        x = torch.tensor(hidden, dtype=self._dtype)
        for block in self._blocks[head]:
            x = x + silu(block(x))
        return predicted(self._outputs[head](x).float().numpy(), None, width)
