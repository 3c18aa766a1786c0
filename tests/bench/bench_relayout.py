"""Throughput of relayout plans in source bytes per second for pairs of layouts, compared with a plain copy.

    python tests/bench/bench_relayout.py

One thread, 1,920 tokens of a model with 28 layers and 8 KV heads of 128, all in memory; best of 7 interleaved rounds.
`staged` is the same through `kv.staged`, with a copy into an 8 MiB staging buffer before each conversion, as over
`shm`.
"""

import sys
from time import perf_counter

import numpy as np

from kvferry.core.ids import BlockId
from kvferry.kv.connectors.windows import CompletedRead, as_pages, copy_raw
from kvferry.kv.interface.connector import Read
from kvferry.kv.pages.layout import KvLayout
from kvferry.kv.pages.relayout import Relayout, plan
from kvferry.kv.staged import StagedRead

NUM_TOKENS = 1920
ROUNDS = 7
PAIRS = [
    (("bfloat16", 16), ("bfloat16", 32)),
    (("bfloat16", 32), ("bfloat16", 16)),
    (("bfloat16", 16), ("bfloat16", 24)),
    (("float32", 16), ("float32", 32)),
    (("float32", 16), ("bfloat16", 16)),
    (("bfloat16", 16), ("float32", 32)),
    (("float32", 16), ("float16", 16)),
    (("int8", 16), ("int8", 32)),
    (("bfloat16", 16), ("int8", 16)),
    (("int8", 16), ("bfloat16", 16)),
]


def layout(dtype: str, block_tokens: int) -> KvLayout:
    return KvLayout("digest", dtype, 28, 8, 128, block_tokens)


class Job:
    """The pages of a pair of layouts, and three ways to copy them."""

    def __init__(self, made: Relayout) -> None:
        self.made = made
        self.blocks = range(NUM_TOKENS // made.source.block_tokens)
        values = np.random.default_rng(1).standard_normal(NUM_TOKENS * made.source.token_bytes // 4, np.float32)
        if made.source.dtype == "bfloat16":  # copy the upper half of each float32 to its lower half
            values.view(np.uint32)[:] &= 0xFFFF0000
            values.view(np.uint32)[:] |= values.view(np.uint32) >> 16
        self.source = memoryview(values.view(np.uint8))
        self.local = [BlockId(b) for b in range(NUM_TOKENS // made.target.block_tokens)]
        self.pages = memoryview(np.zeros(len(self.local) * made.target.block_bytes, np.uint8))
        self.place = memoryview(np.zeros(8 << 20, np.uint8))
        self.plain = np.zeros_like(values)

    def copy(self) -> None:
        self.plain[:] = np.frombuffer(self.source, np.float32)

    def convert(self) -> None:
        targets = as_pages(self.pages, len(self.local), self.made.target.block_bytes)
        self.made.convert(self.source, self.blocks, targets, self.local, 0, NUM_TOKENS)

    def staged(self) -> None:
        theirs = as_pages(self.source, len(self.blocks), self.made.source.block_bytes)

        def start(piece: range, into: memoryview) -> Read:
            copy_raw(theirs, piece, into)
            return CompletedRead()

        read = StagedRead(
            self.made,
            self.blocks,
            NUM_TOKENS,
            start=start,
            place=self.place,
            pages=self.pages,
            first=0,
            local=self.local,
        )
        while not read.poll():
            pass


def main() -> int:
    print(f"{'source':>14} {'target':>14} {'MB':>6} {'copy':>6} {'planned':>8} {'staged':>7}   GB/s")
    for source, target in PAIRS:
        job = Job(plan(layout(*source), layout(*target)))
        best = {"copy": 9e9, "convert": 9e9, "staged": 9e9}
        for _ in range(ROUNDS):
            for name in best:
                begun = perf_counter()
                getattr(job, name)()
                best[name] = min(best[name], perf_counter() - begun)
        size = len(job.source)
        rates = [f"{size / best[name] / 1e9:.1f}" for name in best]
        names = [f"{dtype}/{tokens}" for dtype, tokens in (source, target)]
        print(f"{names[0]:>14} {names[1]:>14} {size / 1e6:6.0f} {rates[0]:>6} {rates[1]:>8} {rates[2]:>7}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
