"""The embedded model in the form that each engine reads: converted from one file, so that all have equal weights.

shipped   the file as published: matrices in Q4_1, embedding in Q8_0
folder    config.json and bfloat16 safetensors in the layout of Hugging Face, each value rounded once from the shipped
f16, bf16 a GGUF like the shipped one with every matrix in that type
"""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from kvferry.model.catalog import DEFAULT_MODEL
from kvferry.model.source import open_model
from kvferry.weights.checkpoints.gguf.gguf_model import GgufModel
from kvferry.weights.config import ModelConfig
from kvferry.weights.tensors import linear_weights

_GGUF_TYPES = {"f16": gguf.GGMLQuantizationType.F16, "bf16": gguf.GGMLQuantizationType.BF16}
_FILE_TYPES = {"f16": gguf.LlamaFileType.MOSTLY_F16, "bf16": gguf.LlamaFileType.MOSTLY_BF16}


class Models:
    """Paths of the forms of a model; each is made at first use and kept in a folder."""

    def __init__(self, folder: Path) -> None:
        found = open_model(DEFAULT_MODEL).tensors
        assert isinstance(found, GgufModel), "the embedded model is a GGUF file"
        self._shipped = found
        self._folder = folder

    @property
    def config(self) -> ModelConfig:
        """Shape of the model."""
        return self._shipped.config

    def path(self, form: str) -> Path:
        """Return the file or folder of a form."""
        if form == "shipped":
            return self._shipped.path
        if form == "folder":
            return self._made("hf-bf16", self._write_folder)
        return self._made(f"{DEFAULT_MODEL}.{form}.gguf", lambda path: self._write_gguf(path, form))

    def weight_bytes(self, weight_class: str) -> int:
        """Return the bytes that a step of one token reads with weights of this class: every tensor once."""
        if weight_class == "4-bit":
            return self._shipped.num_bytes
        return sum(2 * int(np.prod(shape)) for shape in self._shipped.shapes().values())

    def prefill_flop(self, tokens: int) -> float:
        """Return the operations of a prompt: products of the layers and causal attention, without the output head."""
        c = self.config
        attention = c.num_layers * c.num_heads * c.head_dim * 4 * tokens * tokens / 2
        return float(2 * linear_weights(c) * tokens + attention)

    def _made(self, name: str, write: Callable[[Path], None]) -> Path:
        path = self._folder / name
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            partial = self._folder / f"partial-{name}"
            write(partial)
            partial.rename(path)  # atomic
        return path

    def _write_folder(self, path: Path) -> None:
        c = self.config
        path.mkdir(exist_ok=True)
        settings = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size,
            "num_hidden_layers": c.num_layers,
            "num_attention_heads": c.num_heads,
            "num_key_value_heads": c.num_kv_heads,
            "head_dim": c.head_dim,
            "vocab_size": c.vocab_size,
            "max_position_embeddings": c.max_model_tokens,
            "rms_norm_eps": c.rms_norm_eps,
            "rope_theta": c.rope_theta,
            "tie_word_embeddings": c.tie_word_embeddings,
            "bos_token_id": c.bos_token_id,
            "eos_token_id": c.eos_token_ids[0],
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
        }
        (path / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
        tensors = {
            name: torch.from_numpy(np.array(self._shipped.read(name))).to(torch.bfloat16)
            for name in self._shipped.shapes()
        }
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    def _write_gguf(self, path: Path, form: str) -> None:
        reader = gguf.GGUFReader(self._shipped.path)
        writer = gguf.GGUFWriter(path, self.config.architecture)
        for name, field in reader.fields.items():
            if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
                continue
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
        writer.add_file_type(_FILE_TYPES[form])
        for tensor in reader.tensors:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            if values.ndim < 2:  # norms stay in float32
                writer.add_tensor(tensor.name, values)
            else:
                kind = _GGUF_TYPES[form]
                writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
