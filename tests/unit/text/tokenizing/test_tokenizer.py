"""Ids equal those of the model's own tokenizer; plain text never gives control tokens."""

import struct
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from kvferry.core.errors import InvalidRequest, ModelFileError
from kvferry.model import tiny
from kvferry.model.source import ModelSource
from kvferry.text.tokenizing.gguf.header_tokenizer import tokenizer_from_gguf
from kvferry.text.tokenizing.tokenizer import Tokenizer
from kvferry.text.tokenizing.tokenizer_files import tokenizer_from_json
from kvferry.weights.checkpoints.gguf.header import Array
from kvferry.weights.config import ModelConfig

TRICKY = [
    "",
    " ",
    "  two spaces  and\ttabs\n\n\nlines \r\n",
    "digits 12345 3.14 ½ ² ٣٤ 四",
    "naïve façade ÀÉÎ e\u0301",
    "漢字かな交じり文 한국어",
    "🙂👩‍👩‍👧‍👦🇩🇪",
    "it's we'll THEY'RE don't",
    "x" * 500,
    "\x00\x7f\x80\ufffd\ufeff",
    "def f(x):\n    return x ** 2  # comment",
    "<|im_start|>user\nHi<|im_end|>",
]


def test_ids_of_known_strings(smollm: ModelSource) -> None:
    # Ids that transformers gives with the model's published tokenizer.json.
    encode = smollm.tokenizer.encode
    assert encode("The capital of France is", add_special=True) == [504, 3575, 282, 4649, 314]
    assert encode("2024", add_special=True) == [34, 32, 34, 36]
    assert encode("<|im_start|>user\n", add_special=True) == [1, 4093, 198]


@pytest.mark.parametrize("text", TRICKY)
def test_decoding_gives_the_text_back(smollm: ModelSource, text: str) -> None:
    ids = smollm.tokenizer.encode(text, add_special=True, parse_control=False)
    assert smollm.tokenizer.decode(ids) == text
    assert b"".join(map(smollm.tokenizer.token_bytes, ids)) == text.encode()


@given(st.text())
def test_bytes_survive_the_tiny_tokenizer(text: str) -> None:
    tokenizer = tiny.tokenizer(tiny.config())
    assert tokenizer.encode(text, add_special=True, parse_control=False) == list(text.encode())


def test_control_text_is_a_token_only_when_parsed(smollm: ModelSource) -> None:
    tokenizer = smollm.tokenizer
    assert tokenizer.encode("<|im_end|>", add_special=False) == [2]
    spelled = tokenizer.encode("<|im_end|>", add_special=False, parse_control=False)
    assert len(spelled) > 1
    assert not any(tokenizer.is_control(token) for token in spelled)
    assert tokenizer.decode(spelled) == "<|im_end|>"
    assert tokenizer.decode([2]) == ""


@pytest.mark.parametrize("text", TRICKY[:-1])
def test_text_without_control_tokens_has_the_same_ids_either_way(smollm: ModelSource, text: str) -> None:
    encode = smollm.tokenizer.encode
    assert encode(text, add_special=False) == encode(text, add_special=False, parse_control=False)


def test_an_id_that_no_token_has_is_nothing(smollm: ModelSource) -> None:
    assert smollm.tokenizer.token_bytes(10**9) == b""
    assert smollm.tokenizer.token_bytes(-1) == b""


def test_a_panic_of_the_library_is_an_error_of_the_request(
    smollm: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyo3's PanicException is not an Exception, so without a handler of its own it would end the process."""
    panic = type("PanicException", (BaseException,), {})

    class Panics:
        def encode(self, *_: object, **__: object) -> None:
            raise panic("index out of bounds")

    monkeypatch.setattr(smollm.tokenizer, "_fast", Panics())
    with pytest.raises(InvalidRequest, match="cannot be encoded by this model's tokenizer"):
        smollm.tokenizer.encode("x", add_special=False)


def test_half_a_surrogate_pair_is_refused(smollm: ModelSource) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        smollm.tokenizer.encode("a\ud800b", add_special=False)


def gguf_pairs(pre: str, specials: tuple[str, ...] = ("<|end|>",)) -> dict[str, object]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "Ġt", "he", "Ġthe", "12", "123", *specials]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["Ġ t", "h e", "Ġt he", "1 2", "12 3"],
        "tokenizer.ggml.token_type": [1] * (len(tokens) - len(specials)) + [3] * len(specials),
        "tokenizer.ggml.add_bos_token": False,
    }


def read_gguf(pairs: dict[str, object], config: ModelConfig) -> Tokenizer:
    """Return the tokenizer of a GGUF header with these values; lists are encoded as in a file."""
    return tokenizer_from_gguf({k: stored(v) if isinstance(v, list) else v for k, v in pairs.items()}, config, "x.gguf")  # type: ignore[misc]


def stored(values: list[str] | list[int]) -> Array:
    if isinstance(values[0], str):
        texts = [str(value).encode() for value in values]
        return Array(b"".join(struct.pack("<Q", len(t)) + t for t in texts), "s", len(texts), 0)
    return Array(struct.pack(f"<{len(values)}i", *values), "i", len(values), 0)


def config_for(pairs: dict[str, object]) -> ModelConfig:
    from dataclasses import replace

    return replace(tiny.config(), vocab_size=len(pairs["tokenizer.ggml.tokens"]))  # type: ignore[arg-type]


def published(pre: str, pairs: dict[str, object]) -> tokenizers.Tokenizer:
    """Return the same vocabulary with the pre-tokenizer of the published tokenizer.json of Llama 3 or Qwen 2."""
    tokens: list[str] = pairs["tokenizer.ggml.tokens"]  # type: ignore[assignment]
    merges = [tuple(merge.split(" ")) for merge in pairs["tokenizer.ggml.merges"]]  # type: ignore[attr-defined]
    digits = r"\p{N}{1,3}" if pre == "llama-bpe" else r"\p{N}"
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    fast = tokenizers.Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, ignore_merges=pre == "llama-bpe")
    )
    if pre == "qwen2":
        fast.normalizer = normalizers.NFC()
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(tokens[-1], special=True, normalized=False)])
    return fast


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
@pytest.mark.parametrize("text", [*TRICKY, "the 1234567 the<|end|> e\u0301 \n\n the"])
def test_pre_tokenizers_cut_as_the_published_ones(pre: str, text: str) -> None:
    pairs = gguf_pairs(pre)
    ours = read_gguf(pairs, config_for(pairs))
    assert ours.encode(text, add_special=False) == published(pre, pairs).encode(text).ids


@pytest.mark.parametrize("text", TRICKY)
def test_a_tokenizer_json_gives_the_same_ids_and_text(smollm: ModelSource, text: str, tmp_path: object) -> None:
    path = Path(str(tmp_path)) / "tokenizer.json"
    path.write_text(smollm.tokenizer._make().to_str())
    reloaded = tokenizer_from_json(path, smollm.config)
    ids = reloaded.encode(text, add_special=True)
    assert ids == smollm.tokenizer.encode(text, add_special=True)
    assert reloaded.decode(ids) == tokenizers.Tokenizer.from_file(str(path)).decode(ids)


def test_a_post_processor_with_a_token_that_is_not_defined_is_refused(smollm: ModelSource) -> None:
    corpus = Path(__file__).parents[3] / "fuzz" / "corpus" / "tokenizer"
    with pytest.raises(ModelFileError, match="cannot encode an empty text; download it again"):
        tokenizer_from_json(corpus / "93f7aea03b087e51", smollm.config)


def test_begin_of_sequence_is_added_if_the_file_requires_it() -> None:
    from dataclasses import replace

    pairs = gguf_pairs("smollm", ("<|begin|>", "<|end|>")) | {"tokenizer.ggml.add_bos_token": True}
    config = config_for(pairs)
    begin = config.vocab_size - 2
    tokenizer = read_gguf(pairs, replace(config, bos_token_id=begin))
    assert tokenizer.encode("a", add_special=True)[0] == begin
    assert begin not in tokenizer.encode("a", add_special=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer 't5' is not supported"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores does not match the 262 tokens"),
        ({"tokenizer.ggml.pre": "viking"}, "pre-tokenizer 'viking' is not supported"),
        ({"tokenizer.ggml.pre": None}, "pre-tokenizer None"),
        ({"tokenizer.ggml.pre": ["a"]}, "is not supported; use one of gpt-2, olmo, smollm"),
        ({"tokenizer.ggml.merges": ["Ġ unknown"]}, "are inconsistent"),
        ({"tokenizer.ggml.merges": ["whole"]}, "not a merge"),
        ({"tokenizer.ggml.merges": 3}, "not a list of strings"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type does not match"),
    ],
)
def test_a_vocabulary_that_cannot_be_right_is_refused(change: dict[str, object], message: str) -> None:
    pairs = gguf_pairs("smollm")
    with pytest.raises(ModelFileError, match=message):
        read_gguf(pairs | change, config_for(pairs))
