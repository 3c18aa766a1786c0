"""A GGUF file is read exactly, or refused with a clear error: no other exception, no hang, no large allocation."""

import contextlib
import struct
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.kernels.test_compiled_products import random_rows

from kvferry.core.errors import ModelFileError
from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.tensors.batch import StepBatch
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.kv.pages.layout import KvLayout
from kvferry.model import tiny
from kvferry.model.source import ModelSource, open_model
from kvferry.text.tokenizing.byte_level import CHARACTER_OF
from kvferry.text.tokenizing.gguf.header_tokenizer import tokenizer_from_gguf
from kvferry.weights.checkpoints.gguf.gguf_model import GgufModel
from kvferry.weights.checkpoints.gguf.header import Array, read_header
from kvferry.weights.config import ModelConfig

CONFIG = tiny.config()
PLAIN_KINDS = ("F16", "BF16", "Q5_1")
"""Types that the library's quantizer can write."""
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def stored_name(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name.replace("model.layers", "blk")


def stored_order(weights: np.ndarray, heads: int) -> np.ndarray:
    """Return query or key rows in the order of llama.cpp's converter for Llama checkpoints."""
    return weights.reshape(heads, 2, weights.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weights.shape)


def write_tiny(
    path: Path,
    pairs: Mapping[str, object] | None = None,
    kind: GGMLQuantizationType | None = None,
    c: ModelConfig = CONFIG,
    coded: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """Write the tiny model as a GGUF file with the reference library. A value of `None` in `pairs` leaves the key out.
    Tensors whose names end with a key of `coded` get random codes of its type.
    """
    source, rng = tiny.TinyTensors(c), np.random.default_rng(0)
    values: dict[str, object] = {
        "llama.block_count": c.num_layers,
        "llama.context_length": c.max_model_tokens,
        "llama.embedding_length": c.hidden_size,
        "llama.feed_forward_length": c.intermediate_size,
        "llama.attention.head_count": c.num_heads,
        "llama.attention.head_count_kv": c.num_kv_heads,
        "llama.attention.key_length": c.head_dim,
        "llama.attention.value_length": c.head_dim,
        "llama.vocab_size": c.vocab_size,
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 258,
    }
    values |= pairs or {}
    writer = GGUFWriter(path, str(values.pop("architecture", "llama")))
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)  # type: ignore[arg-type]
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", c.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*(CHARACTER_OF[b] for b in range(256)), "<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    writer.add_token_types([1] * 256 + [3] * 3)
    writer.add_token_merges(["a b"])
    writer.add_chat_template(tiny.CHAT_TEMPLATE)
    for name in source.shapes():
        weights = source.read(name)
        if "q_proj" in name or "k_proj" in name:
            weights = stored_order(weights, c.num_heads if "q_proj" in name else c.num_kv_heads)
        as_coded = next((each for end, each in (coded or {}).items() if name.endswith(end)), None)
        if as_coded is not None and as_coded.name not in PLAIN_KINDS:
            writer.add_tensor(
                stored_name(name),
                random_rows(as_coded.name, weights.shape[0], weights.shape[1], rng),
                raw_dtype=as_coded,
            )
        elif as_coded is not None:
            writer.add_tensor(stored_name(name), quantize(weights, as_coded), raw_dtype=as_coded)
        elif kind is not None and weights.ndim == 2 and weights.shape[1] % 32 == 0:
            writer.add_tensor(stored_name(name), quantize(weights, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored_name(name), np.ascontiguousarray(weights))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # "a b" is not a token, so only tests of the header may use this file's merges.
    return write_tiny(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_configuration_and_weights_are_read_in_our_order(good: Path) -> None:
    model, source = GgufModel(good), tiny.TinyTensors(CONFIG)
    assert model.config.rms_norm_eps == 1e-5
    assert model.config.head_dim == 16
    assert model.config.eos_token_ids == (258,)
    assert dict(model.shapes()) == dict(source.shapes())
    for name in source.shapes():
        np.testing.assert_array_equal(model.read(name), source.read(name))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_each_type_is_read_as_by_the_library(tmp_path: Path, kind: str) -> None:
    path = write_tiny(tmp_path / "q.gguf", kind=GGMLQuantizationType[kind])
    ours = GgufModel(path)
    theirs = {t.name: t for t in GGUFReader(path).tensors}
    for name in ("lm_head.weight", "model.layers.1.mlp.down_proj.weight"):
        stored = theirs[stored_name(name)]
        np.testing.assert_array_equal(ours.read(name), dequantize(stored.data, stored.tensor_type))


WIDE = replace(CONFIG, hidden_size=256, intermediate_size=512, head_dim=64)
MIXTURE = {
    "q_proj.weight": GGMLQuantizationType.Q4_K,
    "k_proj.weight": GGMLQuantizationType.Q4_K,
    "v_proj.weight": GGMLQuantizationType.Q6_K,
    "o_proj.weight": GGMLQuantizationType.Q5_K,
    "0.mlp.gate_proj.weight": GGMLQuantizationType.Q3_K,
    "0.mlp.up_proj.weight": GGMLQuantizationType.Q2_K,
    "1.mlp.gate_proj.weight": GGMLQuantizationType.IQ4_NL,
    "1.mlp.up_proj.weight": GGMLQuantizationType.Q5_1,
    "0.mlp.down_proj.weight": GGMLQuantizationType.Q6_K,
    "1.mlp.down_proj.weight": GGMLQuantizationType.BF16,
    "embed_tokens.weight": GGMLQuantizationType.Q6_K,
    "lm_head.weight": GGMLQuantizationType.F16,
}
"""Types as in files of Q4_K_M and similar mixtures, and more."""


def test_a_mixture_of_types_is_read_as_by_the_library_and_computed_equally(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", c=WIDE, coded=MIXTURE)
    model = GgufModel(path)
    theirs = {t.name: t for t in GGUFReader(path).tensors}
    for name in model.shapes():
        stored = theirs[stored_name(name)]
        expected = dequantize(stored.data, stored.tensor_type) if stored.data.dtype == np.uint8 else stored.data
        ours = model.read(name)
        if "q_proj" in name or "k_proj" in name:
            ours = stored_order(ours, WIDE.num_heads if "q_proj" in name else WIDE.num_kv_heads)
        np.testing.assert_array_equal(ours, expected.astype(np.float32).reshape(ours.shape))
    assert {line.split(":")[0] for line in model.weights()} == {"F32", *(kind.name for kind in MIXTURE.values())}
    logits = []
    for kernels in ("torch", "compiled"):
        built = build_model(model.config, model, dtype="float32", kernels=kernels)
        pages = PagedKv.allocate(KvLayout.of(model.config, block_tokens=16, dtype="float32"), 2)
        at = np.arange(9, dtype=np.int64)
        batch = StepBatch(at * 11, at, at, np.array([9]), np.array([9]), np.zeros((1, 1), np.int64), at)
        values = built.compute(batch, pages).values
        logits.append(np.stack([np.array(values[row]) for row in range(9)]))
    assert logits[0].std() > 0.1
    np.testing.assert_allclose(logits[1], logits[0], atol=2e-3 * logits[0].std())


def test_the_embedded_model_is_read_as_by_the_library(smollm: ModelSource) -> None:
    assert isinstance(smollm.tensors, GgufModel)
    theirs = {
        t.name: t
        for t in GGUFReader(smollm.tensors.path).tensors
        if t.name in ("blk.7.ffn_up.weight", "blk.3.attn_k.weight")
    }
    up, k = theirs["blk.7.ffn_up.weight"], theirs["blk.3.attn_k.weight"]
    np.testing.assert_array_equal(
        smollm.tensors.read("model.layers.7.mlp.up_proj.weight"), dequantize(up.data, up.tensor_type)
    )
    ours = smollm.tensors.read("model.layers.3.self_attn.k_proj.weight")
    np.testing.assert_array_equal(stored_order(ours, 3), dequantize(k.data, k.tensor_type))


def test_a_file_cut_anywhere_is_refused(good: Path, tmp_path: Path) -> None:
    data = good.read_bytes()
    cut = tmp_path / "cut.gguf"
    for percent in range(100):
        cut.write_bytes(data[: len(data) * percent // 100])
        with pytest.raises(ModelFileError, match=r"cut\.gguf"):
            GgufModel(cut)


def header_bytes(path: Path) -> int:
    return min(info.start for info in read_header(path.read_bytes(), path).tensors.values())


def test_a_flipped_byte_in_the_header_is_refused_or_leaves_a_usable_file(good: Path, tmp_path: Path) -> None:
    data, flipped = bytearray(good.read_bytes()), tmp_path / "flipped.gguf"
    whole = header_bytes(good)
    refused = 0

    @settings(max_examples=400, deadline=None)
    @given(st.integers(0, whole - 1), st.integers(1, 255))
    def flip(place: int, bits: int) -> None:
        nonlocal refused
        data[place] ^= bits
        flipped.write_bytes(data)
        data[place] ^= bits
        try:
            model = GgufModel(flipped)
            tokenizer_from_gguf(model.pairs, model.config, str(flipped))
            for name in model.shapes():
                model.read(name)
        except ModelFileError:
            refused += 1

    flip()
    assert refused > 0


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_after_the_magic_are_refused(noise: bytes) -> None:
    with pytest.raises(ModelFileError):
        parse(b"GGUF" + struct.pack("<I", 3) + noise)


def parse(data: bytes) -> None:
    """Parse the header and require the key that every model has."""
    header = read_header(data, Path("noise.gguf"))
    if "general.architecture" not in header.pairs:
        raise ModelFileError("no architecture")


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def header(pairs: list[bytes], tensors: list[bytes], tail: int = 256) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    return head + b"".join(pairs) + b"".join(tensors) + bytes(tail)


def tensor(name: str, extents: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(extents)}QIQ", len(extents), *extents, kind, offset)


U32 = struct.pack("<I", 4)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 are left"),
        (b"NOPE" + bytes(64), "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(64), "version 1 is not supported"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(64), "version 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0) + bytes(64), "1152921504606846976 entries exceeds"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60) + bytes(64), "1152921504606846976 entries exceeds"),
        (header([string("k") + U32 + bytes(4)] * 2, []), "key 'k' appears twice"),
        (header([string("k") + struct.pack("<I", 99)], []), "key 'k' has type 99"),
        (header([string("k") + struct.pack("<II", 9, 9)], []), "array of type 9"),
        (header([string("k") + struct.pack("<IIQ", 9, 8, 1 << 61)], []), "exceeds"),
        (header([string("k") + struct.pack("<IIQ", 9, 6, 1 << 61)], []), "exceeds"),
        (header([string("k") + struct.pack("<IIQQ", 9, 8, 1, 1 << 63)], []), "cut short"),
        (header([string("k") + struct.pack("<IQ", 8, 1 << 62)], []), "a string has 4611686018427387904 bytes; at most"),
        (header([struct.pack("<Q", 1 << 40)], []), "a name has 1099511627776 bytes"),
        (header([struct.pack("<Q", 2) + b"\xff\xfe" + U32 + bytes(4)], []), "not UTF-8"),
        (header([string("general.alignment") + U32 + struct.pack("<I", 0)], []), "to 65536, not 0"),
        (header([string("general.alignment") + U32 + struct.pack("<I", 48)], []), "a power of two, not 48"),
        (header([], [tensor("t", [1] * 5)]), "5 dimensions"),
        (
            header([], [tensor("t", [4], kind=77)]),
            "unsupported type id 77; supported types: F32.*Download the file again",
        ),
        (
            header([], [tensor("t", [256], kind=23)]),
            r"has type IQ4_XS, which is not supported; use a file of another quan",
        ),
        (header([], [tensor("t", [33], kind=3)]), r"invalid dimensions \[33\] for type Q4_1"),
        (header([], [tensor("t", [0])]), r"invalid dimensions \[0\] for type F32"),
        (header([], [tensor("t", [1 << 62, 1 << 62])]), "cut short"),
        (header([], [tensor("t", [4], offset=8)]), "not a multiple of 32"),
        (header([], [tensor("t", [16], offset=0), tensor("u", [4], offset=32)]), "'u' overlaps 't'"),
        (header([], [tensor("t", [4], offset=0), tensor("t", [4], offset=32)]), "'t' appears twice"),
        (header([], [tensor("t", [4], offset=1 << 62)]), "cut short"),
    ],
)
def test_errors_name_the_defect(data: bytes, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        read_header(data, Path("x.gguf"))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (
            {"architecture": "mamba"},
            "general.architecture = 'mamba' is not one of llama, mistral3, qwen2,",
        ),
        ({"llama.block_count": 3}, "9 tensors are missing"),
        ({"llama.block_count": 1 << 30}, "num_hidden_layers is 1073741824; at most 4096"),
        ({"llama.block_count": None}, "llama.block_count must be a positive whole number, not None"),
        ({"llama.embedding_length": 64}, "have a wrong shape"),
        ({"llama.attention.head_count": 8}, "have a wrong shape"),
        ({"llama.attention.head_count_kv": 3}, "a multiple of the 3 KV heads"),
        ({"llama.attention.head_count_kv": 0}, "must be a positive whole number, not 0"),
        ({"llama.vocab_size": 300}, "llama.vocab_size = 300 is not supported: 259 tokens are listed"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.factor must be a positive number, not None"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type = 'longrope' is not supported"),
        ({"llama.attention.sliding_window": 512}, "sliding_window = 512 is not supported: kvferry does not implement"),
        ({"llama.expert_count": 8}, "llama.expert_used_count must be a positive whole number, not None"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 9}, "num_experts_per_tok = 9 is not supported"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count = 8 is not supported: it must be the head size 16"),
        ({"llama.attention.value_length": 8}, "value_length = 8 is not supported: it must be the head size 16"),
        ({"llama.attention.temperature_scale": 0.1}, "temperature_scale = 0.1.* is not supported"),
        ({"split.count": 3}, "split.count = 3 of the header are not those of the file's name"),
        ({"llama.rope.freq_base": float("nan")}, "freq_base must be a positive number"),
        ({"tokenizer.ggml.eos_token_id": 5000}, "end token 5000 is not in the vocabulary"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused_by_name(
    tmp_path: Path, pairs: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        GgufModel(write_tiny(tmp_path / "t.gguf", pairs))


@pytest.mark.parametrize("token", [259, (1 << 32) - 1])
def test_a_begin_token_that_is_not_in_the_vocabulary_is_refused(tmp_path: Path, token: int) -> None:
    path = write_tiny(tmp_path / "t.gguf", {"tokenizer.ggml.bos_token_id": token})
    with pytest.raises(ModelFileError, match=f"bos_token_id is {token}, but there are 259 tokens"):
        open_model(str(path))


def numbers(code: int, count: int, each: int) -> bytes:
    return string("k") + struct.pack("<IIQ", 9, code, count) + bytes(count * each)


@pytest.mark.parametrize(
    "data",
    [
        header([numbers(0, 1 << 24, 1)], []),
        header([numbers(7, 1 << 24, 1)], []),
        header([numbers(12, 1 << 21, 8)], []),
        header([numbers(8, 1 << 21, 8)], []),
        header([numbers(8, 1 << 22, 8)], []),
        header([string("k") + struct.pack("<IQ", 8, 17 << 20) + b"x" * (17 << 20)], []),
        header([string(f"{i:x}") + struct.pack("<I?", 7, True) for i in range(1 << 18)], []),
        header([], [tensor(f"{i:x}", [1], 0, 32 * i) for i in range(1 << 17)], 32 << 17),
        header([string("k") + struct.pack("<IIQ", 9, 9, 1) * (1 << 16)], []),
        header([string("k") + struct.pack("<IIQ", 9, 10, 1 << 40)], []),
    ],
    ids=["bytes", "bools", "doubles", "strings", "more-strings", "string", "pairs", "tensors", "nested", "2^40"],
)
def test_a_header_takes_little_more_than_its_own_size(data: bytes) -> None:
    tracemalloc.start()
    try:
        with contextlib.suppress(ModelFileError):
            read_header(data, Path("large.gguf"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(data) + (64 << 10)


def test_more_merges_than_tokens_could_need_are_refused(good: Path) -> None:
    model = GgufModel(good)
    pairs = dict(model.pairs)
    many = string("tokenizer.ggml.merges") + struct.pack("<IIQ", 9, 8, 5000) + string("a b") * 5000
    pairs |= read_header(header([many], []), good).pairs
    with pytest.raises(ModelFileError, match="merges has 5000 strings; at most 4144 are accepted"):
        tokenizer_from_gguf(pairs, model.config, "x.gguf")


@pytest.mark.parametrize("key", ["tokens", "merges"])
def test_strings_that_are_not_text_are_refused(good: Path, key: str) -> None:
    model = GgufModel(good)
    damaged = string(f"tokenizer.ggml.{key}") + struct.pack("<IIQQ", 9, 8, 1, 2) + b"\xff\xfe"
    pairs = {**model.pairs, **read_header(header([damaged], []), good).pairs}
    with pytest.raises(ModelFileError, match=f"{key} is not UTF-8"):
        tokenizer_from_gguf(pairs, model.config, "x.gguf")


def test_arrays_are_read_from_the_file_when_they_are_used() -> None:
    words = string("w") + struct.pack("<IIQ", 9, 8, 2) + string("a") + string("b")
    counts = string("n") + struct.pack("<IIQ3h", 9, 3, 3, -1, 0, 7)
    flags = string("f") + struct.pack("<IIQ2?", 9, 7, 2, True, False)
    pairs = read_header(header([words, counts, flags], []), Path("x.gguf")).pairs
    w, n, f = pairs["w"], pairs["n"], pairs["f"]
    assert isinstance(w, Array)
    assert isinstance(n, Array)
    assert isinstance(f, Array)
    assert (w.strings(), n.numbers().tolist(), f.numbers().tolist()) == (["a", "b"], [-1, 0, 7], [1, 0])
    assert (w.numbers().tolist(), n.strings(), len(w)) == ([], [], 2)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot open"):
        GgufModel(tmp_path / "absent.gguf")
    with pytest.raises(ModelFileError, match="cannot open"):
        GgufModel(tmp_path)


def test_an_open_file_gives_a_source(good: Path) -> None:
    with pytest.raises(ModelFileError, match="vocabulary and merges are inconsistent"):
        open_model(str(good))


def test_released_pages_are_read_from_the_file_again(good: Path) -> None:
    source = GgufModel(good)
    name = next(iter(source.shapes()))
    before = source.read(name).copy()
    source.release()
    assert np.array_equal(source.read(name), before)
