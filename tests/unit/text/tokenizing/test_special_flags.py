"""The flag `special` of a token is read from tokenizer.json and from tokenizer_config.json: a token is a control token
if either file says so, as in transformers 5.23 for its general classes."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from kvferry.model import tiny
from kvferry.model.source import open_model
from kvferry.text.tokenizing.byte_level import CHARACTER_OF
from kvferry.text.tokenizing.tokenizer import Tokenizer

CONFIG = tiny.config()
MARK, WORD = 256, 257


def opened(folder: Path, in_tokenizer: bool | None, entries: object) -> Tokenizer:
    """Open a folder whose tokenizer has the added token `<mark>` unless `in_tokenizer` is `None`; `<word>` is a token
    of the vocabulary. `entries` is `added_tokens_decoder` of tokenizer_config.json."""
    vocabulary = {CHARACTER_OF[byte]: byte for byte in range(256)} | {"<mark>": MARK, "<word>": WORD}
    fast = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    if in_tokenizer is not None:
        fast.add_tokens([AddedToken("<mark>", special=in_tokenizer, normalized=False)])
    source = tiny.TinyTensors(CONFIG)
    save_file({name: source.read(name) for name in source.shapes()}, folder / "model.safetensors")
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size,
        "num_hidden_layers": CONFIG.num_layers,
        "num_attention_heads": CONFIG.num_heads,
        "num_key_value_heads": CONFIG.num_kv_heads,
        "head_dim": CONFIG.head_dim,
        "vocab_size": CONFIG.vocab_size,
        "max_position_embeddings": 2048,
        "eos_token_id": 258,
    }
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "tokenizer.json").write_text(fast.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": entries}))
    return open_model(str(folder)).tokenizer


def entry(text: str, special: Any, **others: object) -> dict[str, object]:
    return {"content": text, "special": special, "normalized": False, "lstrip": False, "rstrip": False, **others}


@pytest.mark.parametrize("in_config", [True, False, None])
@pytest.mark.parametrize("in_tokenizer", [True, False])
def test_a_token_is_a_control_token_if_either_file_says_so(
    tmp_path: Path, in_tokenizer: bool, in_config: bool | None
) -> None:
    entries = {} if in_config is None else {str(MARK): entry("<mark>", in_config)}
    tokenizer = opened(tmp_path, in_tokenizer, entries)
    is_control = in_tokenizer or in_config is True
    assert tokenizer.is_control(MARK) is is_control
    assert tokenizer.decode([65, MARK, 66]) == ("AB" if is_control else "A<mark>B")
    assert tokenizer.encode("<mark>", add_special=False) == [MARK]
    plain = tokenizer.encode("<mark>", add_special=False, parse_control=False)
    assert plain == (list(b"<mark>") if is_control else [MARK])


def test_a_token_of_the_vocabulary_alone_can_be_a_control_token(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, False, {str(WORD): entry("<word>", True, lstrip=True)})
    assert tokenizer.encode(" <word>", add_special=False) == [WORD]
    assert tokenizer.control_tokens["<word>"].token_id == WORD
    assert tokenizer.control_tokens["<word>"].strips_left


@pytest.mark.parametrize(
    "entries",
    [
        {"999": entry("<other>", True)},
        {str(WORD): entry("<mark>", True)},
        {str(MARK): entry("<mark>", "true")},
        {str(MARK): entry("<mark>", True) | {"content": 5}},
        {str(MARK): "<mark>"},
        {"x": entry("<mark>", True)},
        [entry("<mark>", True)],
        None,
    ],
    ids=["unknown", "other-id", "text-flag", "number", "text", "no-id", "list", "none"],
)
def test_an_entry_that_names_no_token_of_the_tokenizer_changes_nothing(tmp_path: Path, entries: object) -> None:
    tokenizer = opened(tmp_path, False, entries)
    assert not tokenizer.control_tokens
    assert tokenizer.num_tokens == 258
