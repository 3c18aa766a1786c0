"""Accuracy of each data type and weight format compared with float32: perplexity and KL divergence on a fixed text.

Texts in the public domain (Lincoln, Dickens, Austen, Melville, Carroll, Shakespeare, the Declaration of Independence),
one after the other in one context. KL(float32 || other) is computed at each position, in nats.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from kvferry.bench.rows import append_csv
from kvferry.core.dtypes import CODED
from kvferry.core.ids import BlockId, RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.tensors.batch import build_batch
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.schedule.step.step import ScheduledSequence, StepPlan
from kvferry.kernels import compiled
from kvferry.kv.pages.layout import KvLayout
from kvferry.model.source import ModelSource, open_model

HERE = Path(__file__).parent
BLOCK = 16
CHUNK = 256
Way = tuple[str, str, str, str]
REFERENCE: Way = ("torch", "float32", "shipped", "exact")


def ways() -> list[Way]:
    """Return combinations of kernels, KV, weights and numerics; the reference is first."""
    found = [REFERENCE]
    for level in compiled.levels():
        kernels = f"compiled-{level}"
        found += [(kernels, dtype, "shipped", "exact") for dtype in ("float32", "bfloat16", *CODED)]
        found += [(kernels, "bfloat16", "bfloat16", "exact"), (kernels, "bfloat16", "shipped", "fast")]
    return [*found, ("torch", "bfloat16", "shipped", "exact")]


@torch.inference_mode()
def log_probabilities(source: ModelSource, tokens: list[int], way: Way) -> torch.Tensor:
    """Return the log-probabilities of every position, [tokens, vocabulary] float64."""
    kernels, dtype, weights, numerics = way
    model = build_model(source.config, source.tensors, dtype=dtype, weights=weights, numerics=numerics, kernels=kernels)
    kv = PagedKv.allocate(KvLayout.of(source.config, block_tokens=BLOCK, dtype=dtype), len(tokens) // BLOCK + 1)
    found = []
    for first in range(0, len(tokens), CHUNK):
        now = min(CHUNK, len(tokens) - first)
        one = ScheduledSequence(
            request_id=RequestId("text"),
            token_ids=tokens,
            num_prompt=len(tokens),
            num_computed=first,
            num_scheduled=now,
            block_ids=[BlockId(i) for i in range(kv.num_blocks)],
            num_sampled=1,
            sampling=SamplingParams(temperature=0.0),
            sample_index=0,
        )
        batch = build_batch(StepPlan((one,)), block_tokens=BLOCK)
        logits = model.compute(replace(batch, sample_rows=np.arange(now)), kv)
        found.append(torch.log_softmax(torch.tensor(logits.values).double(), dim=-1))
    return torch.cat(found)


def main() -> int:
    """Print a table; append rows to a file where one is named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="model, as for kvferry worker")
    parser.add_argument("--csv", type=Path, help="CSV file to which rows are appended")
    arguments = parser.parse_args()
    source = open_model(arguments.model)
    tokens = source.tokenizer.encode((HERE / "texts" / "public_domain.txt").read_text(), add_special=True)
    targets = torch.tensor(tokens[1:])
    reference = torch.empty(0)
    print(f"{len(tokens)} tokens")
    print(f"{'kernels, KV, weights, numerics':<48} perplexity   mean KL    worst KL   same best token")
    for way in ways():
        found = log_probabilities(source, tokens, way)[:-1]
        if way == REFERENCE:
            reference = found
        perplexity = float(torch.exp(-found.gather(1, targets[:, None]).mean()))
        kl = (reference.exp() * (reference - found)).sum(-1)
        same = float((reference.argmax(-1) == found.argmax(-1)).double().mean())
        name = " ".join(way)
        print(
            f"{name:<48} {perplexity:10.4f}  {float(kl.mean()):.2e}  {float(kl.max()):.2e}  {100 * same:8.2f} %",
            flush=True,
        )
        if arguments.csv is not None:
            worst = float(kl.max())
            row = {"way": name, "perplexity": perplexity, "kl": float(kl.mean()), "worst_kl": worst, "same": same}
            append_csv(arguments.csv, [row])
    return 0


if __name__ == "__main__":
    sys.exit(main())
