"""Latent attention and experts: one stream and a prompt on the shape of DeepSeek-V2-Lite with few layers.

    python tests/bench/bench_latent.py --layers 4        kvferry and transformers in turn, in bfloat16, on all cores

Both load the same random checkpoint, which transformers writes to a temporary folder (1.2 GB per layer). One stream:
the mean step of 32 tokens after a prompt of 128. Prompt: the time to the first token of 512 tokens, of which nothing
is cached. The bound is the bytes of the weights that compute one token, by the read rate measured in the same round.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from kvferry.bench.roofline import measure_machine
from kvferry.core.clock import SystemClock
from kvferry.core.process.cores import usable_cores
from kvferry.core.sampling import SamplingParams
from kvferry.engine.execute.models.build import level_of
from kvferry.engine.offline.llm import LLM
from kvferry.model import tiny

VOCABULARY = 8192
LITE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": None,
}
PROMPT, SHORT, STEPS = 512, 128, 32


def write(folder: Path, layers: int) -> None:
    """Write the random checkpoint."""
    config = transformers.DeepseekV2Config(**LITE, num_hidden_layers=layers)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model: Any = transformers.DeepseekV2ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tiny.tokenizer(tiny.config())._make().to_str())


def tokens(count: int, turn: int) -> list[int]:
    return [(turn * 7919 + 31 * i) % 250 for i in range(count)]


def ours(llm: LLM, turn: int) -> tuple[float, float]:
    """Return the times of a decode step and of the prompt, in seconds."""
    begun = time.perf_counter()
    llm.generate([tokens(PROMPT, turn)], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    prompt = time.perf_counter() - begun
    ends = []
    for count in (1, STEPS + 1):
        begun = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        llm.generate([tokens(SHORT, turn + count)], params)
        ends.append(time.perf_counter() - begun)
    return (ends[1] - ends[0]) / STEPS, prompt


@torch.inference_mode()
def theirs(model: Any, turn: int) -> tuple[float, float]:
    begun = time.perf_counter()
    model(torch.tensor([tokens(PROMPT, turn)]), logits_to_keep=1, use_cache=True)
    prompt = time.perf_counter() - begun
    found = model(torch.tensor([tokens(SHORT, turn + 1)]), logits_to_keep=1, use_cache=True)
    begun = time.perf_counter()
    for _ in range(STEPS):
        chosen = found.logits[:, -1].argmax(-1, keepdim=True)
        found = model(chosen, past_key_values=found.past_key_values, use_cache=True)
    return (time.perf_counter() - begun) / STEPS, prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument(
        "--experts", default="eager", help="value of transformers' experts_implementation; default: %(default)s"
    )
    given = parser.parse_args()
    threads = usable_cores()
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write(folder, given.layers)
        llm = LLM(str(folder), dtype="bfloat16", kernels=given.kernels, kv_memory=256 << 20)
        other: Any = transformers.DeepseekV2ForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, experts_implementation=given.experts
        ).train(False)
        rate = measure_machine(level_of(llm.model.kernels), threads, SystemClock())
        rows = []
        for turn in range(given.rounds):
            machine = rate()
            rows.append(
                (*ours(llm, 2 * turn), *theirs(other, 2 * turn), llm.model.weight_bytes / machine.read_gbps / 1e9)
            )
        step, prompt, their_step, their_prompt, bound = (
            statistics.median(column) for column in zip(*rows, strict=True)
        )
        print(
            f"{llm.model.kernels}, {threads} threads, {given.layers} layers, active {llm.model.weight_bytes >> 20} MiB"
        )
        report("one stream", step, their_step)
        print(f"            {bound / step:.2f} of the bytes bound")
        report(f"{PROMPT} tokens", prompt, their_prompt)


def report(what: str, seconds: float, others: float) -> None:
    ratio = others / seconds
    print(f"{what}  {1e3 * seconds:8.2f} ms, transformers {1e3 * others:8.2f} ms: {ratio:.2f} x")


if __name__ == "__main__":
    main()
