"""Targets: the files of a model."""

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
from safetensors.numpy import save

from harness.fuzz.mutation import bytes_at_random, json_at_random
from harness.fuzz.target import Run, Target
from kvferry.core.errors import InvalidRequest, ModelFileError
from kvferry.model import tiny
from kvferry.model.source import ModelSource, open_model
from kvferry.text.templates.chat_template import ChatTemplate
from kvferry.text.templates.template_costs import FILTERS, TESTS, TEXT_METHODS
from kvferry.text.tokenizing.tokenizer_files import tokenizer_from_json
from kvferry.text.tools.conversations import encode_chat
from kvferry.weights.config import ModelConfig
from kvferry.weights.tensors import expected_shapes

CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 259,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "eos_token_id": [258, 256],
    "bos_token_id": 257,
    "tie_word_embeddings": True,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
CONVERSATION = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi <|im_end|> 12 \u00e9"}]


def used(source: ModelSource) -> None:
    """Read all tensors of a model, and use its tokenizer and its chat template."""
    for name in source.tensors.shapes():
        source.tensors.read(name)
    try:
        source.tokenizer.encode("Hello  <|im_end|> 123 \u00e9\U0001f600", add_special=True)
        source.tokenizer.decode([0, 5, 258])
        if source.chat_template is not None:
            encode_chat(source.chat_template, source.tokenizer, CONVERSATION)
    except InvalidRequest:
        pass


# ---------------------------------------------------------------------- GGUF


def gguf_seed(kind: int = 0) -> bytes:
    """Return a small valid file; `kind` is the type number of its matrices."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def number(key: str, value: int) -> bytes:
        return text(key) + struct.pack("<II", 4, value)

    def words(key: str, values: list[str]) -> bytes:
        return text(key) + struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(text, values))

    tokens = [*"abcdefghijklmnopqrstuvwxyz", "ab", "<|im_start|>", "<|im_end|>"]
    hidden = 32
    pairs = [
        *(
            text(key) + struct.pack("<I", 8) + text(value)
            for key, value in {
                "general.architecture": "llama",
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "smollm",
                "tokenizer.chat_template": tiny.CHAT_TEMPLATE,
            }.items()
        ),
        *(
            number(f"llama.{key}", value)
            for key, value in {
                "block_count": 1,
                "context_length": 64,
                "embedding_length": hidden,
                "feed_forward_length": 32,
                "attention.head_count": 2,
                "attention.head_count_kv": 1,
                "vocab_size": len(tokens),
            }.items()
        ),
        number("tokenizer.ggml.eos_token_id", len(tokens) - 1),
        text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5),
        words("tokenizer.ggml.tokens", tokens),
        words("tokenizer.ggml.merges", ["a b"]),
        text("tokenizer.ggml.token_type") + struct.pack(f"<IIQ{len(tokens)}i", 9, 5, len(tokens), *[1] * 27, 3, 3),
    ]
    shapes = {
        "token_embd.weight": (len(tokens), hidden),
        "output_norm.weight": (hidden,),
        **{f"blk.0.{name}_norm.weight": (hidden,) for name in ("attn", "ffn")},
        **{f"blk.0.{name}.weight": (hidden, hidden) for name in ("attn_q", "attn_output", "ffn_gate", "ffn_up")},
        **{f"blk.0.{name}.weight": (hidden // 2, hidden) for name in ("attn_k", "attn_v")},
        "blk.0.ffn_down.weight": (hidden, 32),
    }
    table, data = b"", b""
    for name, shape in shapes.items():
        type_id = kind if len(shape) == 2 else 0
        table += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), type_id, len(data))
        content = bytes(int(np.prod(shape)) // 32 * {0: 128, 2: 18, 8: 34, 14: 0}[type_id])
        data += content + bytes(-len(content) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(pairs)) + b"".join(pairs) + table
    return head + bytes(-len(head) % 32) + data


def _gguf_seeds() -> list[bytes]:
    return [gguf_seed(), gguf_seed(2), gguf_seed(8)]


def _gguf_mutate(data: bytes, random: Random) -> bytes:
    """Change the header. The data has no structure, so it stays."""
    words = [struct.pack("<I", kind) for kind in range(14)] + [b"GGUF", b"llama", b"qwen3", b"a b", b"{{ messages }}"]
    split = min(len(data), 3000)
    return bytes_at_random(data[:split], random, words) + data[split:]


@contextmanager
def _gguf() -> Iterator[Run]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"

        def run(data: bytes) -> None:
            path.write_bytes(data)
            with suppress(ModelFileError):
                used(open_model(str(path)))

        yield run


# ---------------------------------------------------------------------- a folder of safetensors and JSON


def _config() -> ModelConfig:
    return ModelConfig(
        name="fuzz",
        architecture="llama",
        vocab_size=259,
        hidden_size=4,
        intermediate_size=4,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=2,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_model_tokens=64,
        tie_word_embeddings=True,
        eos_token_ids=(256, 258),
        bos_token_id=257,
    )


def _weights(dtype: type = np.float32) -> bytes:
    return save({name: np.zeros(shape, dtype) for name, shape in expected_shapes(_config()).items()})


def header_mutate(data: bytes, random: Random) -> bytes:
    """Change the JSON of the header; in most cases, adjust its length."""
    length = int.from_bytes(data[:8], "little")
    if not 2 <= length <= len(data) - 8 or random.random() < 0.2:
        return bytes_at_random(data, random)
    header = json_at_random(data[8 : 8 + length], random, ("F32", "BF16", "I64"))
    size = len(header) if random.random() < 0.9 else random.choice((0, 1, 1 << 40, len(header) + 1))
    return size.to_bytes(8, "little") + header + data[8 + length :]


@contextmanager
def _folder(replaced: str) -> Iterator[Run]:
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "model.safetensors").write_bytes(_weights())
        (folder / "tokenizer.json").write_text(tiny.tokenizer(_config())._make().to_str())
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": tiny.CHAT_TEMPLATE}))

        def run(data: bytes) -> None:
            (folder / replaced).write_bytes(data)
            try:
                if replaced == "tokenizer.json":
                    config = _config()
                    tokenizer = tokenizer_from_json(folder / replaced, config)
                    used(ModelSource(config, tokenizer, ChatTemplate(tiny.CHAT_TEMPLATE), tiny.TinyTensors(_TINY), str))
                else:
                    used(open_model(name))
            except ModelFileError:
                pass

        yield run


_TINY = tiny.config()


def _tokenizer_seeds() -> list[bytes]:
    plain = json.loads(tiny.tokenizer(_config())._make().to_str())
    small = {
        **plain,
        "model": {**plain["model"], "vocab": {"a": 0, "b": 1, "ab": 2, "<|im_end|>": 3}, "merges": ["a b"]},
    }
    return [
        json.dumps(value).encode()
        for value in (
            small,
            {**small, "normalizer": {"type": "NFC"}, "truncation": None, "padding": None},
            {**small, "normalizer": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"}},
            {
                **small,
                "pre_tokenizer": {
                    "type": "Split",
                    "pattern": {"Regex": "(a|b)+"},
                    "behavior": "Isolated",
                    "invert": False,
                },
                "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
            },
            {
                **small,
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                    "special_tokens": {"a": {"id": "a", "ids": [0], "tokens": ["a"]}},
                },
            },
            {
                **small,
                "model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0], ["b", -1.0]], "byte_fallback": False},
            },
            {
                **small,
                "model": {
                    "type": "WordPiece",
                    "unk_token": "a",
                    "continuing_subword_prefix": "##",
                    "max_input_chars_per_word": 100,
                    "vocab": {"a": 0, "b": 1},
                },
            },
        )
    ]


# ---------------------------------------------------------------------- chat templates

_FRAGMENTS = [
    *(f" | {name}".encode() for name in FILTERS),
    *(f" is {name}".encode() for name in TESTS if name.isalpha()),
    *(f".{name}(".encode() for name in TEXT_METHODS),
    *(
        b"{% for x in range(99999) %}",
        b"{% endfor %}",
        b"{{ ",
        b" }}",
        b"{% set x = ",
        b"{% set ns.x = ",
        b" %}",
        b"ns.x",
    ),
    *(
        b"{% macro f(a) %}",
        b"{% endmacro %}",
        b"f(",
        b")",
        b"[",
        b"]",
        b"(",
        b"{",
        b"}",
        b" ~ ",
        b" + ",
        b" * ",
        b" % ",
    ),
    *(b"{% if ", b"{% else %}", b"{% endif %}", b"{% set x %}", b"{% endset %}", b"{% call f(1) %}", b"{% endcall %}"),
    *(
        b"messages",
        b"messages[0].content",
        b"namespace(x='a')",
        b"99999999",
        b"'%99d'",
        b"[1, 2]",
        b"{'a': 1}",
        b"loop.",
    ),
]
_TEMPLATES = [
    tiny.CHAT_TEMPLATE.encode(),
    b"{% set ns = namespace(x='ab') %}{% for i in range(9) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    b"{% macro f(a, b=2) %}{{ a }}{% if b %}{{ f(a, b - 1) }}{% endif %}{% endmacro %}{{ f([1, 'x'], 3) | upper }}",
    b"{% for k, v in messages[0].items() %}{{ k | tojson }}{{ v.split('i') | join(',') }}{{ loop.index }}{% endfor %}",
    b"{{ messages | map(attribute='content') | select('string') | list | sort | first | replace('a', 'bb') }}",
    b"{{ '%s %d' % ('a', 3) }}{{ '{} {x}'.format(1, x=2) }}{{ messages[1:][::-1] | length }}{{ 'a'.center(9) * 3 }}",
]


def _template_mutate(data: bytes, random: Random) -> bytes:
    return bytes_at_random(data, random, _FRAGMENTS, most=1 << 14)


@contextmanager
def _template() -> Iterator[Run]:
    def run(data: bytes) -> None:
        with suppress(ModelFileError, InvalidRequest):
            ChatTemplate(data.decode("utf-8", "replace")).render(CONVERSATION)

    yield run


TARGETS = (
    Target("gguf", _gguf_seeds, _gguf, _gguf_mutate),
    Target(
        "safetensors", lambda: [_weights(), _weights(np.float16)], partial(_folder, "model.safetensors"), header_mutate
    ),
    Target("config", lambda: [json.dumps(CONFIG).encode()], partial(_folder, "config.json"), json_at_random),
    Target("tokenizer", _tokenizer_seeds, partial(_folder, "tokenizer.json"), json_at_random),
    Target("template", lambda: list(_TEMPLATES), _template, _template_mutate),
)
