"""Trains an EAGLE-3 head of a reduced vocabulary for the embedded model, on text that the model writes.

    make train-head ARGS="--folder DIR"     writes config.json and model.safetensors to DIR; serve with eagle=DIR

1. The model answers prompts that are composed from lists of topics and tasks, and continues paragraphs of this tree's
   documentation; its hidden states are recorded in the steps that write the text (Li et al., EAGLE-3, 2025, section 3).
2. The head learns the next token, and its output the model's last hidden state (as in EAGLE, 2024, section 4.2); in the
   later part of the training also from its own output (training-time test, EAGLE-3, section 3.2).

Its output head is the model's, of the tokens that are most frequent in the text, and is not trained. With the same
seed, kernels and number of threads, the result is the same. Prints the share of right tokens on text that was left out.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention, silu, smooth_l1_loss

from kvferry.core.clock import SystemClock
from kvferry.core.hashing import BlockNamers
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.engine import EngineSettings, SchedulerLimits
from kvferry.engine.build import LoadedModel, build_engine, load_model, runner_for
from kvferry.engine.execute.run.runner import ComputedStep, PreparedStep, Runner
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.step.step import StepPlan
from kvferry.weights.config import ModelConfig
from kvferry.weights.tensors import EMBEDDING, FINAL_NORM, layer_prefix

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m-instruct"
LAYERS = (10, 20, 29)
"""Layers whose inputs the head reads."""
TASKS = (
    "Explain {} to a child.", "What is {}?", "Write a short story about {}.", "List five facts about {}.",
    "Why does {} matter?", "Describe {} in one paragraph.", "What are the advantages and disadvantages of {}?",
    "Write an email to a friend about {}.", "Give three tips about {}.", "Summarize the history of {}.",
    "How would you teach {} to pupils?", "Write a poem about {}.", "Compare {} with something similar.",
    "What should a beginner learn first about {}?", "Answer a common question about {}.", "Explain how {} works.",
    "Write a dialogue between two people about {}.", "What mistakes do people make with {}?",
)  # fmt: skip
TOPICS = (
    "rain", "the moon", "volcanoes", "rivers", "bicycles", "computers", "the Roman Empire", "gravity", "music",
    "photosynthesis", "cats", "dogs", "the heart", "vaccines", "democracy", "money", "banks", "chess", "football",
    "cooking rice", "gardening", "trees", "bees", "whales", "the ocean", "electricity", "magnets", "batteries",
    "airplanes", "trains", "bridges", "maps", "clocks", "calendars", "fractions", "geometry", "probability",
    "programming in Python", "the internet", "email", "passwords", "artificial intelligence", "robots", "books",
    "libraries", "painting", "theatre", "the printing press", "telescopes", "stars", "planets", "dinosaurs", "fossils",
    "earthquakes", "glaciers", "deserts", "forests", "climate", "recycling", "solar power", "windmills", "coffee",
    "tea", "cheese", "chocolate", "salt", "sugar", "sleep", "exercise", "friendship", "family", "school", "homework",
    "job interviews", "public speaking", "travel", "Paris", "Japan", "Africa", "the Amazon", "mountains", "snow",
    "swimming", "running", "yoga", "memory", "dreams", "language", "translation", "writing", "poetry", "history",
    "medicine", "doctors", "teeth", "eyes", "sound", "light", "colours", "atoms", "water", "fire", "ice", "wind",
)  # fmt: skip
HELD_OUT = 0.04
"""Share of the texts that are left out of the training."""
Text = tuple[list[int], np.ndarray, np.ndarray]
"""Tokens [N]; inputs of `LAYERS` [N - 1, 3 * hidden] and last hidden states [N - 1, hidden] in float16."""


class Recording(Runner):
    """Runner that records the hidden states of all rows."""

    def __init__(self, loaded: LoadedModel, kv: PagedKv) -> None:
        super().__init__(loaded.model, kv)
        self.rows: dict[RequestId, list[tuple[np.ndarray, np.ndarray]]] = {}

    def prepare(self, plan: StepPlan) -> PreparedStep:
        step = super().prepare(plan)
        batch = replace(step.batch, hidden_rows=np.arange(len(step.batch.token_ids)), tapped_layers=LAYERS)
        return replace(step, batch=batch)

    def compute(self, step: PreparedStep) -> ComputedStep:
        done = super().compute(step)
        assert done.hidden is not None
        assert done.tapped is not None
        first = 0
        for item in step.plan.scheduled:
            end = first + item.num_scheduled
            own = (done.tapped[first:end].astype(np.float16), done.hidden[first:end].astype(np.float16))
            self.rows.setdefault(item.request_id, []).append(own)
            first = end
        return replace(done, hidden=None, tapped=None)


def write_texts(loaded: LoadedModel, *, count: int, tokens: int, seed: int) -> Iterator[Text]:
    """Let the model write `count` texts of `tokens` tokens each, and yield them as they end."""
    draw = Random(seed)
    assert loaded.source is not None
    tokenizer = loaded.source.tokenizer
    paragraphs = [
        part
        for path in sorted((ROOT / "docs").glob("*.md"))
        for part in path.read_text().split("\n\n")
        if len(part) > 200
    ]
    runner = Recording(loaded, runner_for(loaded).kv)
    engine = build_engine(loaded, runner, namers=BlockNamers(b"training"))
    prompts: dict[str, list[int]] = {}
    waiting = list(range(count))
    written: dict[str, list[int]] = {}
    while waiting or engine.has_work:
        while waiting and engine.scheduler.num_waiting == 0:
            name, number = RequestId(f"t{waiting[0]}"), waiting.pop(0)
            if draw.random() < 0.1:
                prompt = tokenizer.encode(draw.choice(paragraphs)[:400], add_special=False)
            else:
                asked = draw.choice(TASKS).format(draw.choice(TOPICS))
                text = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
                prompt = tokenizer.encode(text, add_special=False)
            warm = draw.random() < 0.3
            sampling = SamplingParams(temperature=0.8 if warm else 0.0, seed=number, max_tokens=tokens)
            prompts[name], written[name] = list(prompt), []
            engine.add(EngineRequest(name, list(prompt), sampling))
        for update in engine.step().updates:
            assert update.error is None, update.error
            written[update.request_id] += [token.token_id for token in update.tokens]
            if update.finish_reason is not None:
                parts = runner.rows.pop(update.request_id)
                tapped, last = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
                ids = [*prompts.pop(update.request_id), *written.pop(update.request_id)]
                skipped = len(ids) - 1 - len(tapped)  # cached prefixes have no hidden states
                yield ids[skipped:], tapped, last
                engine.reset_prefix_cache()


class Head(torch.nn.Module):
    """An EAGLE-3 head, for the training."""

    def __init__(self, loaded: LoadedModel, ids: torch.Tensor) -> None:
        super().__init__()
        config = loaded.config
        assert loaded.source is not None
        read = loaded.source.tensors.read
        hidden, q = config.hidden_size, config.num_heads * config.head_dim
        kv = config.num_kv_heads * config.head_dim
        at = layer_prefix(config.num_layers - 1)

        def parameter(*shape: int, scale: float | None = None) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(shape) * (scale if scale is not None else shape[-1] ** -0.5))

        def of_model(name: str) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.tensor(read(name)))

        self.config = config
        self.fc = parameter(hidden, len(LAYERS) * hidden, scale=0.01)
        with torch.no_grad():
            self.fc[:, -hidden:] += torch.eye(hidden)
        self.qkv = parameter(q + 2 * kv, 2 * hidden)
        self.output = parameter(hidden, q, scale=0.02)
        self.gate = of_model(f"{at}mlp.gate_proj.weight")
        self.up = of_model(f"{at}mlp.up_proj.weight")
        self.down = of_model(f"{at}mlp.down_proj.weight")
        self.of_embedding = torch.nn.Parameter(torch.ones(hidden))
        self.of_hidden = torch.nn.Parameter(torch.ones(hidden))
        self.before_mlp = of_model(f"{at}post_attention_layernorm.weight")
        self.norm = of_model(FINAL_NORM)
        embedding = torch.tensor(read(EMBEDDING))
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("lm_head", embedding[ids].clone(), persistent=False)
        half = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles = torch.arange(1024)[:, None] * config.rope_theta**-half
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps) * weight

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the outputs [B, T, hidden] for the tokens [B, T] and the fused hidden states [B, T, hidden]."""
        config = self.config
        embedded = self.embedding[tokens]
        x = torch.cat((self.normed(embedded, self.of_embedding), self.normed(hidden, self.of_hidden)), dim=-1)
        heads = linear(x, self.qkv).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        q, k = self.rotated(q), self.rotated(k)
        repeat = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + linear(seen, self.output)
        y = self.normed(hidden, self.before_mlp)
        return hidden + linear(silu(linear(y, self.gate)) * linear(y, self.up), self.down)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        count, half = x.shape[2], x.shape[3] // 2
        cos, sin = self.cos[:count], self.sin[:count]
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def batch_of(texts: list[Text], new_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return padded arrays of texts: next tokens and hidden states of the rows, labels (-1 for none) and the last
    hidden states of the tokens after them."""
    length = max(len(ids) for ids, _, _ in texts) - 2
    width, hidden = texts[0][1].shape[1], texts[0][2].shape[1]
    tokens, labels = torch.zeros(len(texts), length, dtype=torch.long), torch.full((len(texts), length), -1)
    tapped, after = torch.zeros(len(texts), length, width), torch.zeros(len(texts), length, hidden)
    for i, (ids, states, last) in enumerate(texts):
        count = len(ids) - 2
        tokens[i, :count] = torch.tensor(ids[1:-1])
        labels[i, :count] = new_ids[torch.tensor(ids[2:])]
        tapped[i, :count] = torch.from_numpy(states[:count].astype(np.float32))
        after[i, :count] = torch.from_numpy(last[1 : count + 1].astype(np.float32))
    return tokens, tapped, labels, after


def losses(head: Head, arrays: tuple[torch.Tensor, ...], passes: int) -> tuple[torch.Tensor, list[float]]:
    """Return the loss, and the share of right tokens of each pass, among all rows with a next token.

    Args:
        head: the head.
        arrays: result of `batch_of`.
        passes: passes; each but the first reads the outputs of the one before it instead of the model's hidden states.
    """
    tokens, tapped, labels, after = arrays
    hidden = linear(tapped, head.fc)
    total, shares = torch.zeros(()), list[float]()
    is_row = after.abs().sum(-1) > 0
    for index in range(passes):
        out = head(tokens, hidden)
        normed = head.normed(out, head.norm)
        logits = linear(normed[is_row], head.lm_head)
        known = labels[is_row]
        loss = cross_entropy(logits, known, ignore_index=-1)
        loss = loss + 2.0 * smooth_l1_loss(normed[is_row], after[is_row])
        total = total + loss * 0.6**index
        shares.append(float((logits.argmax(-1) == known).float().mean()))
        # The next pass reads the outputs of the previous position.
        hidden, tokens, labels, after = out[:, :-1], tokens[:, 1:], labels[:, 1:], after[:, 1:]
        is_row = is_row[:, 1:]
    return total, shares


def train(
    loaded: LoadedModel, texts: list[Text], *, vocabulary: int, steps: int, seed: int
) -> tuple[Head, torch.Tensor]:
    """Train a head in a number of steps of eight texts each; print the progress."""
    torch.manual_seed(seed)
    counts = Counter(token for ids, _, _ in texts for token in ids)
    ids = torch.tensor(sorted(token for token, _ in counts.most_common(vocabulary)))
    new_ids = torch.full((loaded.config.vocab_size,), -1)
    new_ids[ids] = torch.arange(len(ids))
    head = Head(loaded, ids)
    held = texts[: max(4, int(HELD_OUT * len(texts)))]
    used = texts[len(held) :]
    draw = Random(seed)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(steps):
        share = step / steps
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 20) * (0.02 + 0.49 * (1 + math.cos(math.pi * share)))
        arrays = batch_of(draw.sample(used, min(8, len(used))), new_ids)
        loss, shares = losses(head, arrays, 1 if share < 0.7 else 2)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 24:
            print(f"step {step + 1}: loss {loss.item():.3f}, right {shares}", flush=True)
    with torch.inference_mode():
        found = [losses(head, batch_of([text], new_ids), 3)[1] for text in held]
        print("right tokens of texts that were left out, by draft position:", np.mean(found, axis=0).round(3).tolist())
    return head, ids


def save(head: Head, ids: torch.Tensor, folder: Path) -> None:
    """Write the head in the published layout."""
    config: ModelConfig = head.config
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    names = {
        "fc.weight": head.fc,
        "midlayer.self_attn.q_proj.weight": head.qkv[:q],
        "midlayer.self_attn.k_proj.weight": head.qkv[q : q + kv],
        "midlayer.self_attn.v_proj.weight": head.qkv[q + kv :],
        "midlayer.self_attn.o_proj.weight": head.output,
        "midlayer.mlp.gate_proj.weight": head.gate,
        "midlayer.mlp.up_proj.weight": head.up,
        "midlayer.mlp.down_proj.weight": head.down,
        "midlayer.input_layernorm.weight": head.of_embedding,
        "midlayer.hidden_norm.weight": head.of_hidden,
        "midlayer.post_attention_layernorm.weight": head.before_mlp,
        "norm.weight": head.norm,
        "lm_head.weight": head.lm_head,
    }
    tensors = {name: values.detach().to(torch.float16).contiguous().clone() for name, values in names.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**tensors, "d2t": ids - torch.arange(len(ids)), "t2d": t2d}, folder / "model.safetensors")
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": len(ids),
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_model_tokens,
        "hidden_act": "silu",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)},
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="folder for the head")
    parser.add_argument("--texts", type=int, default=1200)
    parser.add_argument("--tokens", type=int, default=128, help="tokens that the model writes per text")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recorded", type=Path, help="file that keeps the texts, so that they are written once")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    limits = SchedulerLimits(token_budget=256, max_chunk_tokens=256, max_num_seqs=32)
    settings = EngineSettings(MODEL, kv_memory=1 << 28, limits=limits, threads=asked.threads, async_steps="off")
    loaded, clock = load_model(settings), SystemClock()
    texts: list[Text] = []
    if asked.recorded and asked.recorded.is_file():
        with np.load(asked.recorded) as found:
            ends = found["ends"].tolist()
            ids, tapped, last = found["ids"], found["tapped"], found["last"]
        for index, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            rows = slice(first - index, end - index - 1)
            texts.append((ids[first:end].tolist(), tapped[rows], last[rows]))
    else:
        begun = clock.monotonic()
        for text in write_texts(loaded, count=asked.texts, tokens=asked.tokens, seed=asked.seed):
            texts.append(text)
            if len(texts) % 100 == 0:
                print(f"{len(texts)} texts, {clock.monotonic() - begun:.0f} s", flush=True)
        if asked.recorded:
            np.savez(
                asked.recorded,
                ids=np.concatenate([np.array(text[0]) for text in texts]),
                ends=np.cumsum([len(text[0]) for text in texts]),
                tapped=np.concatenate([text[1] for text in texts]),
                last=np.concatenate([text[2] for text in texts]),
            )
    print(f"{sum(len(text[0]) for text in texts)} tokens in {len(texts)} texts", flush=True)
    begun = clock.monotonic()
    head, kept = train(loaded, texts, vocabulary=asked.vocabulary, steps=asked.steps, seed=asked.seed)
    print(f"{asked.steps} steps, {clock.monotonic() - begun:.0f} s")
    save(head, kept, asked.folder)


if __name__ == "__main__":
    main()
