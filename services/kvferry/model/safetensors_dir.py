"""A Hugging Face folder as a model: config.json, one or several .safetensors files, tokenizer files.

A safetensors file is [ header bytes u64 LE ][ JSON ][ data ]; the JSON gives each tensor's type, shape and
[begin, end) within the data. Everything is checked before a byte of data is used. Files are mapped, not read.
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
from kvferry.model.tensors import BF16, F16, F32, HEAD, Shape, Stored, check_shapes

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_TYPE_IDS = {"F32": F32, "F16": F16, "BF16": BF16}
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_MAX_JSON_BYTES = 64 << 20

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class _Stored:
    data: mmap.mmap
    dtype: str
    shape: Shape
    start: int
    """First byte within the file."""


class SafetensorsModel:
    """An open folder: `config` and, as a `TensorSource`, its weights. The files must not change while this lives."""

    def __init__(self, folder: Path, name: str | None = None) -> None:
        """
        Raises:
            ModelFileError: a file is missing, damaged, or describes a model that is not supported.
        """
        self.path = folder
        raw = read_json(folder / "config.json")
        self.weight_files = _weight_files(folder)
        self._tensors: dict[str, _Stored] = {}
        for path in self.weight_files:
            for tensor, stored in _open(path).items():
                if tensor in self._tensors:
                    raise ModelFileError(f"{path}: tensor {tensor!r} is in another file of the folder too")
                self._tensors[tensor] = stored
        self.config = read_config(raw, name or folder.resolve().name, folder)
        if self.config.tie_word_embeddings:
            self._tensors.pop(HEAD, None)  # some checkpoints repeat the tied matrix
        # Old Llama checkpoints store the rotary frequencies, which follow from the configuration.
        self._tensors = {n: t for n, t in self._tensors.items() if not n.endswith("rotary_emb.inv_freq")}
        check_shapes(self.config, self.shapes(), str(folder))

    def shapes(self) -> Mapping[str, Shape]:
        """Every tensor's shape."""
        return {name: stored.shape for name, stored in self._tensors.items()}

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """One tensor as float32; for a file in F32 a read-only view of the file."""
        stored = self._tensors[name]
        count = math.prod(stored.shape)
        if stored.dtype == "BF16":
            halves = np.frombuffer(stored.data, dtype="<u2", count=count, offset=stored.start)
            return (halves.astype(np.uint32) << 16).view(np.float32).reshape(stored.shape)
        kind = "<f4" if stored.dtype == "F32" else "<f2"
        values = np.frombuffer(stored.data, dtype=kind, count=count, offset=stored.start).reshape(stored.shape)
        return values.astype(np.float32, copy=False)

    def stored(self, name: str) -> Stored:
        """One matrix as it is in the file."""
        stored = self._tensors[name]
        count = math.prod(stored.shape) * _BYTES[stored.dtype]
        data = np.frombuffer(stored.data, dtype=np.uint8, count=count, offset=stored.start)
        return Stored.plain(_TYPE_IDS[stored.dtype], data, stored.shape[0])

    def release(self) -> None:
        """Let the files' pages go; the system may keep them cached, but no longer for this process."""
        for data in {id(stored.data): stored.data for stored in self._tensors.values()}.values():
            data.madvise(mmap.MADV_DONTNEED)


def read_config(raw: Json, name: str, where: Path) -> ModelConfig:
    """The configuration that a `config.json` describes.

    Raises:
        ModelFileError: the architecture or a feature is not supported, or a number is missing; it is named.
    """
    fields = _Fields(raw, where / "config.json")
    architecture = fields.architecture()
    fields.refuse_unsupported(architecture)
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    if raw.get("head_dim") is None and hidden % heads:
        raise ModelFileError(f"{where}: hidden_size {hidden} does not divide among {heads} heads")
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
        max_model_tokens=fields.whole("max_position_embeddings"),
        rope_scaling=scaling,
        tie_word_embeddings=raw.get("tie_word_embeddings", False) is True,
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        eos_token_ids=fields.end_tokens(where),
        bos_token_id=fields.optional_token("bos_token_id"),
    )


class _Fields:
    """A config.json, asked for one number at a time."""

    def __init__(self, raw: Json, where: Path) -> None:
        self._raw = raw
        self._where = where

    def architecture(self) -> str:
        named = self._raw.get("architectures")
        first = named[0] if isinstance(named, list) and named else None
        if not isinstance(first, str) or first not in ARCHITECTURES:
            supported = ", ".join(ARCHITECTURES)
            raise ModelFileError(f"{self._where}: architecture {first!r} is not supported ({supported} are)")
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
        """Base and scaling; transformers 5 keeps both in `rope_parameters`, earlier ones in two fields."""
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

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise ModelFileError(f"{self._where}: {key} must be a positive whole number, not {value!r}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelFileError(f"{self._where}: {key} must be a positive number, not {value!r}")
        return float(value)

    def optional_token(self, key: str) -> int | None:
        value = self._raw.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def end_tokens(self, folder: Path) -> tuple[int, ...]:
        """End tokens of config.json and of generation_config.json, which names more for chat models."""
        found: set[int] = set()
        generation = folder / "generation_config.json"
        for raw in (self._raw, read_json(generation) if generation.is_file() else {}):
            value = raw.get("eos_token_id")
            for token in _listed(value):
                if isinstance(token, int) and not isinstance(token, bool):
                    found.add(token)
        return tuple(sorted(found))


def read_json(path: Path) -> Json:
    """A JSON object from a file of reasonable size.

    Raises:
        ModelFileError: it is missing, too large, or not a JSON object.
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelFileError(f"{path} is larger than {_MAX_JSON_BYTES} bytes; it is not a model's JSON file")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} holds a {type(value).__name__}; an object is expected")
    return value


def _weight_files(folder: Path) -> list[Path]:
    """The single file, or those that the index names. A name may not lead out of the folder."""
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
            raise ModelFileError(f"{index} names {name!r}, which is not a file of the folder")
    return [folder / name for name in names]


def _open(path: Path) -> dict[str, _Stored]:
    """Map one file and check its table.

    Raises:
        ModelFileError: lengths, types, shapes or ranges do not add up.
    """
    try:
        with path.open("rb") as handle:
            data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelFileError(f"cannot open {path}: {error}") from error

    def damaged(what: str) -> ModelFileError:
        return ModelFileError(f"{path} ({len(data)} bytes) is not a usable safetensors file: {what}. Get it again")

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
    if not _are_sizes(shape) or not _are_sizes(span) or len(span) != 2:
        raise damaged(f"tensor {name!r} has shape {shape!r} and range {span!r}")
    if math.prod(shape) * _BYTES[dtype] != span[1] - span[0]:
        raise damaged(f"tensor {name!r} of shape {shape} and type {dtype} does not fill {span}")
    return dtype, tuple(shape), span[0], span[1]


def _listed(value: object) -> list[object]:
    """A list as it is, nothing as no items, anything else as one item."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 60 for item in value)
