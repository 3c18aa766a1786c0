"""Checkpoints of the tiny model as trainers write them: a Hugging Face folder, whole or in parts."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvferry.model import tiny
from kvferry.text.tokenizing.byte_level import CHARACTER_OF

_SPECIALS = (tiny.END_OF_TEXT, tiny.BOS, tiny.END_OF_TURN)


def write_checkpoint(folder: Path, seed: int, *, parts: int = 1, has_tokenizer: bool = True, **changes: object) -> Path:
    """Write a checkpoint and return its folder.

    Args:
        folder: folder to create.
        seed: seed of the weights.
        parts: number of files of the weights; with more than one, there is an index.
        has_tokenizer: whether to write the tokenizer's files.
        changes: fields of config.json that differ from the tiny model's.
    """
    folder.mkdir(parents=True)
    model = tiny.config(max_model_tokens=4096)
    given = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
        "max_position_embeddings": model.max_model_tokens,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": list(model.eos_token_ids),
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps({**given, **changes}))
    source = tiny.TinyTensors(model, seed)
    tensors = {name: np.ascontiguousarray(source.read(name)) for name in source.shapes()}
    if parts == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        names = sorted(tensors)
        files = {name: f"model-{index % parts + 1:05d}-of-{parts:05d}.safetensors" for index, name in enumerate(names)}
        for file in sorted(set(files.values())):
            save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
        index = {"metadata": {}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if has_tokenizer:
        fast = Tokenizer(models.BPE(vocab={CHARACTER_OF[b]: b for b in range(256)}, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIALS])
        fast.save(str(folder / "tokenizer.json"))
        settings = {"chat_template": tiny.CHAT_TEMPLATE, "bos_token": tiny.BOS, "eos_token": tiny.END_OF_TEXT}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
