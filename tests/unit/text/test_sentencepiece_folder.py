"""A folder with a SentencePiece vocabulary, like Gemma's: begin token, end tokens, and a template without a system
role.
"""

import json
from pathlib import Path

import pytest
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from kvferry.core.errors import KvferryError
from kvferry.model import tiny
from kvferry.model.source import open_model
from kvferry.text.tokenizing.tokenizer import Detokenizer

SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
WORDS = [*SPECIALS, *(f"<0x{b:02X}>" for b in range(256)), "\u2581", "h", "i", "hi", "u", "s", "e", "r", "\n"]
BOS, END_OF_TURN = 2, 5
TEMPLATE = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n{{ message['content'] | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>user\n{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fast = Tokenizer(
        models.BPE({word: i for i, word in enumerate(WORDS)}, [("h", "i")], unk_token="<unk>", byte_fallback=True)
    )
    fast.normalizer = normalizers.Replace(" ", "\u2581")
    fast.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    fast.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    fast.save(str(tmp_path / "tokenizer.json"))
    config = tiny.config()
    source = tiny.TinyTensors(config)
    tensors = {name: source.read(name) for name in source.shapes()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name].repeat(2, axis=0)[: len(WORDS)]
    save_file(tensors, tmp_path / "model.safetensors")
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(WORDS),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": 512,
        "bos_token_id": BOS,
        "eos_token_id": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, END_OF_TURN]}))
    settings = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return tmp_path


def test_the_begin_token_precedes_plain_prompts_and_stands_once_in_a_chat(folder: Path) -> None:
    source = open_model(str(folder))
    assert source.config.eos_token_ids == (1, END_OF_TURN)
    assert not source.tokenizer.is_byte_level
    assert source.tokenizer.encode("hi", add_special=True) == [BOS, WORDS.index("hi")]
    assert source.tokenizer.encode("hi", add_special=False) == [WORDS.index("hi")]
    assert source.chat_template is not None
    text = source.chat_template.render([{"role": "user", "content": " hi "}])
    assert text == "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>user\n"
    ids = source.tokenizer.encode(text, add_special=False)
    assert ids.count(BOS) == 1
    assert ids[:2] == [BOS, SPECIALS.index("<start_of_turn>")]
    with pytest.raises(KvferryError, match="System role not supported"):
        source.chat_template.render([{"role": "system", "content": "x"}])


def test_bytes_and_spaces_are_preserved(folder: Path) -> None:
    tokenizer = open_model(str(folder)).tokenizer
    for text in ("hi user", " hi  é🙂\n", "<end_of_turn>"):
        ids = tokenizer.encode(text, add_special=False, parse_control=False)
        assert END_OF_TURN not in ids
        assert tokenizer.decode(ids) == text
        detokenizer = Detokenizer(tokenizer)
        assert "".join(detokenizer.feed([token]) for token in ids) + detokenizer.finish() == text
