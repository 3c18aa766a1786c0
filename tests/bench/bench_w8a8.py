"""W8A8 in int8: prompts beside 16-bit weights, and the KL of rounded activations beside the format's definition.

    python tests/bench/bench_w8a8.py              all on this machine's cores; a minute, and 2 GB in a temporary folder

Speed: layers of Llama 3.2 1B's shape with random weights, in bfloat16 and as a compressed-tensors checkpoint (int8 per
channel); the time to the first token of a prompt of 512 tokens, in turn. KL: the embedded model, quantized in the same
way, against its 16-bit form, on the texts of bench_quality. The format's definition rounds a row's activations with one
step per token; it is computed by transformers with the dequantized weights.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from bench_quality import HERE, REFERENCE, Way, log_probabilities
from harness.kernels.quantized_checkpoints import FORMS, quantize_folder
from peers.models import Models
from safetensors.torch import load_file, save_file

from kvferry.core.sampling import SamplingParams
from kvferry.engine.offline.llm import LLM
from kvferry.model import tiny
from kvferry.model.catalog import DEFAULT_MODEL
from kvferry.model.source import open_model
from kvferry.weights.checkpoints.safetensors_dir import SafetensorsModel

PROMPT = 512
SHAPE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "bos_token_id": 257,
    "eos_token_id": 258,
}


def quantized(folder: Path, place: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Copy a folder and quantize its projections; return the copy and the dequantized weights."""
    copy = place / f"{folder.name}-int8"
    shutil.copytree(folder, copy)
    path = copy / "model.safetensors"
    save_file({name: value.float() for name, value in load_file(path).items()}, path)
    return copy, quantize_folder(FORMS["int8"], copy)


def first_token(llm: LLM, turn: int) -> float:
    """Return the time to first token of a prompt without cached blocks, in seconds."""
    tokens = [(turn * 7919 + 31 * i) % 250 for i in range(PROMPT)]
    begun = time.perf_counter()
    llm.generate([tokens], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    return time.perf_counter() - begun


def speeds(place: Path, layers: int, rounds: int) -> None:
    wide = place / "bfloat16"
    torch.manual_seed(0)
    made: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, num_hidden_layers=layers))
    made.to(torch.bfloat16).save_pretrained(wide)
    (wide / "tokenizer.json").write_text(tiny.tokenizer(tiny.config())._make().to_str())
    coded, _ = quantized(wide, place)
    ways = {
        "bfloat16": LLM(str(wide), dtype="bfloat16", kv_memory=64 << 20),
        "int8, exact": LLM(str(coded), dtype="bfloat16", kv_memory=64 << 20),
        "int8, fast": LLM(str(coded), dtype="bfloat16", numerics="fast", kv_memory=64 << 20),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, llm in ways.items():
            seconds[name].append(first_token(llm, turn))
    print(f"{ways['int8, fast'].model.kernels}, {layers} layers, prompts of {PROMPT} tokens")
    medians = {name: statistics.median(found[1:]) for name, found in seconds.items()}
    for name, median in medians.items():
        print(f"{name:<12} {1e3 * median:8.1f} ms, {medians['bfloat16'] / median:.2f} x bfloat16")


def round_tokens(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Round the inputs of a projection to int8 with one step per token."""
    x = given[0]
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return ((x / step).round().clamp(-127, 127) * step, *given[1:])


@torch.inference_mode()
def definition(folder: Path, values: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """Return the log-probabilities of all positions as the format defines them."""
    model: Any = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).train(False)
    for name, value in values.items():
        module = model.get_submodule(name.removesuffix(".weight"))
        module.weight.copy_(value)
        module.register_forward_pre_hook(round_tokens)
    return torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1)


def divergences(place: Path) -> None:
    whole = open_model(DEFAULT_MODEL)
    tokens = whole.tokenizer.encode((HERE / "texts" / "public_domain.txt").read_text(), add_special=True)
    wide = Models(place / "embedded").path("folder")
    coded, values = quantized(wide, place)

    def found(folder: Path, way: Way) -> torch.Tensor:
        model: Any = SafetensorsModel(folder)
        source: Any = SimpleNamespace(config=model.config, tensors=model)
        return log_probabilities(source, tokens, way)

    reference = found(wide, REFERENCE)
    results = {
        "int8 weights": found(coded, REFERENCE),
        "int8 weights, fast": found(coded, ("auto", "bfloat16", "shipped", "fast")),
        "one step per token": definition(wide, values, tokens),
    }
    print(json.dumps({"tokens": len(tokens)}))
    for name, each in results.items():
        kl = (reference.exp() * (reference - each)).sum(-1)
        same = float((reference.argmax(-1) == each.argmax(-1)).double().mean())
        print(f"{name:<20} KL {float(kl.mean()):.2e}, same best token {100 * same:.2f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        speeds(Path(place), given.layers, given.rounds)
        divergences(Path(place))


if __name__ == "__main__":
    main()
