"""Opens a GGUF file as a model: reads the configuration from its header, and its tensors by Hugging Face name.

llama.cpp permutes the rows of Llama's query and key projections so that rotary pairs are adjacent (rows 2i and 2i + 1
of a head); this project, like Hugging Face checkpoints, pairs row i with row i + head_dim/2. `read` converts to that
order. Qwen files are not permuted.
"""

import mmap
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import ModelFileError
from kvferry.model.config import ModelConfig
from kvferry.model.families.registry import GGUF_ARCHITECTURES
from kvferry.model.files.dequantize import dequantize
from kvferry.model.files.gguf_header import Array, Header, TensorInfo, Value, read_header
from kvferry.model.files.regular_file import map_file
from kvferry.model.tensors import EMBEDDING, FINAL_NORM, HEAD, Shape, Stored, check_shapes

_TOP = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufModel:
    """An open GGUF file: `config`, the header's key-value `pairs` (with tokenizer and template), and its weights.

    Implements `TensorSource`. The file is memory-mapped and must not change while it is open.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        """
        Args:
            path: the GGUF file.
            name: model name for clients; `None` selects the file name without its suffix.

        Raises:
            ModelFileError: the file is missing, damaged or unsupported.
        """
        self.path = path
        self._data = map_file(path)
        header = read_header(self._data, path)
        self.pairs = header.pairs
        self.config = _Fields(path, header).config(name or path.stem)
        self._tensors = {_common_name(info.name): info for info in header.tensors.values()}
        check_shapes(self.config, self.shapes(), str(path))

    def shapes(self) -> Mapping[str, Shape]:
        """Return the shape of every tensor by its Hugging Face name."""
        return {name: info.shape for name, info in self._tensors.items()}

    def weights(self) -> list[str]:
        """Return a line for each tensor type, with the number of tensors and their bytes."""
        found: dict[str, list[TensorInfo]] = {}
        for info in self._tensors.values():
            found.setdefault(info.type_name, []).append(info)
        return [f"{kind}: {len(of)} tensors of {sum(i.num_bytes for i in of)} bytes" for kind, of in found.items()]

    def storage(self) -> Mapping[str, TensorInfo]:
        """Return type, shape and file position of every tensor by its Hugging Face name."""
        return self._tensors

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """Read a tensor, dequantized to float32."""
        info = self._tensors[name]
        array = dequantize(self._raw(info), info)
        if self._stands_in_pairs(name):
            array = _halves_from_pairs(array, self.config.head_dim)
        return array

    def stored(self, name: str) -> Stored:
        """Return the quantized rows of a matrix, as stored in the file."""
        info = self._tensors[name]
        rows = np.arange(info.shape[0], dtype=np.int64)
        if self._stands_in_pairs(name):
            half = self.config.head_dim // 2
            rows = np.ascontiguousarray(rows.reshape(-1, half, 2).swapaxes(1, 2)).reshape(-1)
        return Stored(info.type_id, self._raw(info), rows)

    def release(self) -> None:
        """Unmap the file's resident pages from this process; the pages may stay in the page cache."""
        self._data.madvise(mmap.MADV_DONTNEED)

    def _raw(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._data, dtype=np.uint8, count=info.num_bytes, offset=info.start)

    def _stands_in_pairs(self, name: str) -> bool:
        return self.config.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight"))


def _halves_from_pairs(rows: npt.NDArray[np.float32], head_dim: int) -> npt.NDArray[np.float32]:
    """Reorder each head's rows from llama.cpp's order (0, half, 1, half + 1, ...) to (0, 1, 2, ...).

    Args:
        rows: [heads * head_dim, in].
    """
    columns = rows.shape[1]
    pairs = rows.reshape(-1, head_dim // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1, columns)


def _common_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor; unknown names are unchanged, and the shape check reports them."""
    if name in _TOP:
        return _TOP[name]
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        return name
    return f"model.layers.{int(match[1])}.{_LAYER[match[2]]}.{match[3]}"


class _Fields:
    """Reads the model configuration from the header's key-value pairs."""

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        self._pairs = header.pairs
        self._header = header

    def config(self, name: str) -> ModelConfig:
        architecture = self._pairs.get("general.architecture")
        if architecture not in GGUF_ARCHITECTURES:
            raise ModelFileError(
                f"{self._path}: general.architecture = {repr(architecture)[:40]} is not one of"
                f" {', '.join(GGUF_ARCHITECTURES)}; other families are read from safetensors folders"
            )
        a = str(architecture)
        self._refuse_unsupported(a)
        hidden, heads = self._whole(f"{a}.embedding_length"), self._whole(f"{a}.attention.head_count")
        if f"{a}.attention.key_length" not in self._pairs and hidden % heads:
            raise ModelFileError(f"{self._path}: hidden size {hidden} is not divisible by {heads} heads")
        head_dim = self._whole(f"{a}.attention.key_length", hidden // heads)
        tokens = self._pairs.get("tokenizer.ggml.tokens")
        vocab_size = len(tokens) if isinstance(tokens, Array) else 0
        declared = self._whole(f"{a}.vocab_size", vocab_size or None)
        if vocab_size and declared != vocab_size:
            raise ModelFileError(f"{self._path}: {vocab_size} tokens are listed but {a}.vocab_size is {declared}")
        for dims in ("rope.dimension_count", "attention.value_length"):
            if self._whole(f"{a}.{dims}", head_dim) != head_dim:
                raise ModelFileError(
                    f"{self._path}: {a}.{dims} must be the head size {head_dim}, not {self._whole(f'{a}.{dims}')}"
                )
        return ModelConfig(
            name=name,
            architecture=a,
            vocab_size=declared,
            hidden_size=hidden,
            intermediate_size=self._whole(f"{a}.feed_forward_length"),
            num_layers=self._whole(f"{a}.block_count"),
            num_heads=heads,
            num_kv_heads=self._whole(f"{a}.attention.head_count_kv", heads),
            head_dim=head_dim,
            rms_norm_eps=self._real(f"{a}.attention.layer_norm_rms_epsilon"),
            rope_theta=self._real(f"{a}.rope.freq_base", 10000.0),
            max_model_tokens=self._whole(f"{a}.context_length"),
            tie_word_embeddings="output.weight" not in self._header.tensors,
            qkv_bias="blk.0.attn_q.bias" in self._header.tensors and a == "qwen2",
            qk_norm=a == "qwen3",
            eos_token_ids=tuple(sorted(self._token_ids("eos", "eot", "eom"))),
            bos_token_id=min(self._token_ids("bos"), default=None),
        )

    def _refuse_unsupported(self, a: str) -> None:
        for key, harmless in (
            ("rope.scaling.type", "none"),
            ("attention.sliding_window", 0),
            ("expert_count", 0),
        ):
            value = self._pairs.get(f"{a}.{key}", harmless)
            if value != harmless:
                raise ModelFileError(
                    f"{self._path}: {a}.{key} must be {harmless!r} or missing, not {repr(value)[:40]}; use the model's "
                    "safetensors folder"
                )
        if "rope_freqs.weight" in self._header.tensors:
            raise ModelFileError(
                f"{self._path}: rope_freqs.weight (Llama 3 frequency scaling) is not read from GGUF;"
                " use the model's safetensors folder"
            )

    def _whole(self, key: str, default: int | None = None) -> int:
        value: Value | None = self._pairs.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise ModelFileError(f"{self._path}: {key} must be a positive whole number, not {value!r}")
        return value

    def _real(self, key: str, default: float | None = None) -> float:
        value: Value | None = self._pairs.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ModelFileError(f"{self._path}: {key} must be a positive number, not {value!r}")
        # Stored as float32: 1e-05 reads as 9.999999747378752e-06, while the checkpoint has 1e-05.
        return float(str(np.float32(value)))

    def _token_ids(self, *names: str) -> set[int]:
        found = (self._pairs.get(f"tokenizer.ggml.{name}_token_id") for name in names)
        return {value for value in found if isinstance(value, int) and not isinstance(value, bool)}
