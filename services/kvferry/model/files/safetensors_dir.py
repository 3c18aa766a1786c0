"""Opens a Hugging Face folder as a model: config.json, one or more .safetensors files, tokenizer files.

A safetensors file is [ header bytes u64 LE ][ JSON ][ data ]; the JSON has each tensor's type, shape and range [begin,
end) in the data. The header is checked completely before data is used. Files are memory-mapped.
"""

import json
import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import ModelFileError
from kvferry.model.config import Llama3RopeScaling, ModelConfig
from kvferry.model.files.regular_file import map_file, read_file
from kvferry.model.tensors import BF16, F16, F32, HEAD, Shape, Stored, check_shapes

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_TYPE_IDS = {"F32": F32, "F16": F16, "BF16": BF16}
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_MAX_DIMENSIONS = 8
_MAX_MODEL_TOKENS = 4 << 20
"""Longest context; tables of rotary angles have a row for each position."""
_MAX_REAL = 1e30

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class _Stored:
    data: mmap.mmap
    dtype: str
    shape: Shape
    start: int
    """Offset of the tensor's first byte in the file."""


class SafetensorsModel:
    """An open folder: `config` and, as a `TensorSource`, the weights. The files must not change while the folder is
    open."""

    def __init__(self, folder: Path, name: str | None = None) -> None:
        """
        Raises:
            ModelFileError: a file is missing or damaged, or the model is not supported.
        """
        self.path = folder
        raw = read_json(folder / "config.json")
        self.weight_files = _weight_files(folder)
        self._tensors: dict[str, _Stored] = {}
        for path in self.weight_files:
            for tensor, stored in _open(path).items():
                if tensor in self._tensors:
                    raise ModelFileError(f"{path}: tensor {tensor!r} is in more than one file of the folder")
                self._tensors[tensor] = stored
        self.config = read_config(raw, name or folder.resolve().name, folder)
        if self.config.tie_word_embeddings:
            self._tensors.pop(HEAD, None)  # some checkpoints duplicate the tied matrix
        # Old Llama checkpoints store the rotary frequencies, which are derived from the configuration.
        self._tensors = {n: t for n, t in self._tensors.items() if not n.endswith("rotary_emb.inv_freq")}
        check_shapes(self.config, self.shapes(), str(folder))

    def shapes(self) -> Mapping[str, Shape]:
        """Return the shape of every tensor by name."""
        return {name: stored.shape for name, stored in self._tensors.items()}

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """Read a tensor as float32; return a read-only view of the file if the tensor is stored as F32."""
        stored = self._tensors[name]
        count = math.prod(stored.shape)
        if stored.dtype == "BF16":
            halves = np.frombuffer(stored.data, dtype="<u2", count=count, offset=stored.start)
            return (halves.astype(np.uint32) << 16).view(np.float32).reshape(stored.shape)
        kind = "<f4" if stored.dtype == "F32" else "<f2"
        values = np.frombuffer(stored.data, dtype=kind, count=count, offset=stored.start).reshape(stored.shape)
        return values.astype(np.float32, copy=False)

    def stored(self, name: str) -> Stored:
        """Return the rows of a matrix, as stored in the file."""
        stored = self._tensors[name]
        count = math.prod(stored.shape) * _BYTES[stored.dtype]
        data = np.frombuffer(stored.data, dtype=np.uint8, count=count, offset=stored.start)
        return Stored.plain(_TYPE_IDS[stored.dtype], data, stored.shape[0])

    def release(self) -> None:
        """Unmap the files' resident pages from this process; the pages may stay in the page cache."""
        for data in {id(stored.data): stored.data for stored in self._tensors.values()}.values():
            data.madvise(mmap.MADV_DONTNEED)


def read_config(raw: Json, name: str, where: Path) -> ModelConfig:
    """Convert the content of a `config.json` to a `ModelConfig`.

    Raises:
        ModelFileError: the architecture or a feature is not supported, or a field is missing; the message contains the
            field.
    """
    fields = _Fields(raw, where / "config.json")
    architecture = fields.architecture()
    fields.refuse_unsupported(architecture)
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    if raw.get("head_dim") is None and hidden % heads:
        raise ModelFileError(f"{where}: hidden_size {hidden} is not divisible by {heads} heads")
    theta, scaling = fields.rope()
    return ModelConfig(
        name=name,
        architecture=architecture,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size"),
        num_layers=fields.whole("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.whole("num_key_value_heads", heads),
        head_dim=fields.whole("head_dim", hidden // heads),
        rms_norm_eps=fields.real("rms_norm_eps", 1e-6),
        rope_theta=theta,
        max_model_tokens=fields.context_tokens(),
        rope_scaling=scaling,
        tie_word_embeddings=raw.get("tie_word_embeddings", False) is True,
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        eos_token_ids=fields.end_tokens(where),
        bos_token_id=fields.optional_token("bos_token_id"),
    )


class _Fields:
    """Reads and checks the fields of a config.json."""

    def __init__(self, raw: Json, where: Path) -> None:
        self._raw = raw
        self._where = where

    def architecture(self) -> str:
        named = self._raw.get("architectures")
        first = named[0] if isinstance(named, list) and named else None
        if not isinstance(first, str) or first not in ARCHITECTURES:
            supported = ", ".join(ARCHITECTURES)
            raise ModelFileError(f"{self._where}: architecture {first!r} is not supported; supported are {supported}")
        return ARCHITECTURES[first]

    def refuse_unsupported(self, architecture: str) -> None:
        raw = self._raw
        problems = {
            "attention_bias": architecture != "qwen2" and raw.get("attention_bias"),
            "mlp_bias": raw.get("mlp_bias"),
            "use_sliding_window": raw.get("use_sliding_window"),
            "sliding_window": architecture == "llama" and raw.get("sliding_window"),
            "hidden_act": raw.get("hidden_act", "silu") != "silu",
            "quantization_config": raw.get("quantization_config") is not None,
            "layer_types": set(map(str, _listed(raw.get("layer_types")))) - {"full_attention"},
        }
        for key, present in problems.items():
            if present:
                raise ModelFileError(f"{self._where}: {key} = {raw.get(key)!r} is not supported")

    def rope(self) -> tuple[float, Llama3RopeScaling | None]:
        """Return RoPE base and scaling. transformers 5 stores both in `rope_parameters`, earlier versions in two
        fields."""
        given = self._raw.get("rope_parameters") or self._raw.get("rope_scaling") or {}
        if not isinstance(given, dict):
            raise ModelFileError(f"{self._where}: rope_scaling must be an object, not {given!r}")
        inner = _Fields(given, self._where)
        theta = inner.real("rope_theta", self.real("rope_theta", 10000.0))
        kind = given.get("rope_type", given.get("type", "default"))
        if kind == "default":
            return theta, None
        if kind != "llama3":
            raise ModelFileError(f"{self._where}: rope_scaling type {kind!r} is not supported (llama3 is)")
        return theta, Llama3RopeScaling(
            factor=inner.real("factor"),
            low_freq_factor=inner.real("low_freq_factor"),
            high_freq_factor=inner.real("high_freq_factor"),
            original_max_position=inner.whole("original_max_position_embeddings"),
        )

    def context_tokens(self) -> int:
        key = "max_position_embeddings"
        value = self.whole(key)
        if value > _MAX_MODEL_TOKENS:
            raise ModelFileError(f"{self._where}: {key} is {value}; at most {_MAX_MODEL_TOKENS} is supported")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise ModelFileError(f"{self._where}: {key} must be a positive whole number, not {value!r}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MAX_REAL:
            raise ModelFileError(f"{self._where}: {key} must be a positive number, not {repr(value)[:40]}")
        return float(value)

    def optional_token(self, key: str) -> int | None:
        value = self._raw.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def end_tokens(self, folder: Path) -> tuple[int, ...]:
        """Return the end-of-sequence tokens in config.json and generation_config.json; the latter has additional ones
        for chat."""
        found: set[int] = set()
        generation = folder / "generation_config.json"
        for raw in (self._raw, read_json(generation) if generation.is_file() else {}):
            value = raw.get("eos_token_id")
            for token in _listed(value):
                if isinstance(token, int) and not isinstance(token, bool):
                    found.add(token)
        return tuple(sorted(found))


def read_json(path: Path) -> Json:
    """Read a JSON object from a file of limited size.

    Raises:
        ModelFileError: the file is missing, too large, or not a JSON object.
    """
    try:
        value = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} contains a {type(value).__name__}; a JSON object is expected")
    return value


def _weight_files(folder: Path) -> list[Path]:
    """Return the weight files: a single file, or all files in the index. Reject names outside the folder."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise ModelFileError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
        return [single]
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ModelFileError(f"{index} has no weight_map")
    names = sorted({str(name) for name in table.values()})
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ModelFileError(f"{index} lists {name!r}, which is not a file in the folder")
    return [folder / name for name in names]


def _open(path: Path) -> dict[str, _Stored]:
    """Map a file and check its tensor table.

    Raises:
        ModelFileError: lengths, types, shapes or ranges are inconsistent.
    """
    data = map_file(path)

    def damaged(what: str) -> ModelFileError:
        return ModelFileError(f"{path} ({len(data)} bytes) is not a usable safetensors file: {what}. Download it again")

    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= length <= min(_MAX_HEADER_BYTES, len(data) - 8):
        raise damaged(f"a header of {length} bytes")
    try:
        table = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise damaged("its header is not JSON") from error
    if not isinstance(table, dict):
        raise damaged("its header is not an object")
    table.pop("__metadata__", None)
    tensors: dict[str, _Stored] = {}
    end = 0
    entries = [(name, *_entry(name, entry, damaged)) for name, entry in table.items()]
    for name, dtype, shape, begin, stop in sorted(entries, key=lambda e: (e[3], e[4])):
        if begin != end:
            raise damaged(f"tensor {name!r} begins at {begin}, where {end} is expected (a hole or an overlap)")
        end = stop
        tensors[name] = _Stored(data, dtype, shape, 8 + length + begin)
    if 8 + length + end != len(data):
        raise damaged(f"its tensors end at byte {8 + length + end}")
    return tensors


def _entry(name: str, entry: object, damaged: Callable[[str], ModelFileError]) -> tuple[str, Shape, int, int]:
    if not isinstance(entry, dict):
        raise damaged(f"tensor {name!r} is not described by an object")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BYTES:
        raise damaged(f"tensor {name!r} has type {dtype!r}; supported are {', '.join(_BYTES)}")
    if isinstance(shape, list) and len(shape) > _MAX_DIMENSIONS:
        raise damaged(f"tensor {name!r} has {len(shape)} dimensions")
    if not _are_sizes(shape) or not _are_sizes(span) or len(span) != 2:
        raise damaged(f"tensor {name!r} has shape {shape!r} and range {span!r}")
    if math.prod(shape) * _BYTES[dtype] != span[1] - span[0]:
        raise damaged(f"tensor {name!r} of shape {shape} and type {dtype} does not fill {span}")
    return dtype, tuple(shape), span[0], span[1]


def _listed(value: object) -> list[object]:
    """Convert a value to a list: a list is unchanged, `None` becomes empty, any other value becomes one item."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 60 for item in value)
