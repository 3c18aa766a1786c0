"""The page docs/results.md."""

from collections.abc import Mapping, Sequence

_HEAD = """# Results of the papers, reproduced

The design rests on claims of three sources: the PagedAttention paper (Kwon et al., SOSP 2023), the thesis on vLLM
(Kwon, UC Berkeley, 2025) and the article "Inside vLLM" (2025). `make results` reproduces each with the code of this
repository, on two cores and without a GPU, and writes this page, its pictures and `build/results.json`;
`make results ARGS="--only H4"` reproduces one row. {passed} of {count} rows pass their line.

## Set-up

Most rows run in the [simulator](simulator.md): production scheduler, block pool and prefix index on a virtual clock.
Rows H15, H16, H29, H32 and H33 run engines; H21 to H24 measure times on a shared machine with two cores (AMD EPYC),
H21 and H22 with both sides in turn, and H26 reads the rows of `make bench-steps`.

A baseline changes a decision (`services/kvferry/testing/baselines`): memory is reserved in contiguous chunks by a buddy
allocator, for the context (Max), for the output rounded up to a power of two (Pow2) or for the true output (Oracle), as
in the paper's section 6.1; or batches are static.

- *Device.* OPT-13B on an A100 with 12 GB of KV memory, 15,728 slots: 26 GFLOP per token at half of 312 TFLOP/s, 800 KiB
  of KV per token at 1.555 TB/s, and 32 ms per step. The last number is the only one that was fitted: to the published
  mean batch of the paged system at 2 requests per second. Rows of the thesis and of the article use an accelerator
  of the H100's size.
- *Lengths.* The data sets are not included. Log-normal lengths with the published means (ShareGPT 161 and 338 tokens,
  Alpaca 19 and 58) stand for them; their spread is an assumption, on which rows that depend
  on tails rely.
- *Rates.* The rate of a system is the highest at which the mean latency per output token is within 0.1 s, about twice
  that of an unloaded worker, to 5 %.

## Rows

| row | source | claim | original | ours | line | |
| --- | --- | --- | --- | --- | --- | --- |
"""
_TAIL = """
## What the rows do not show

- Step times of simulated rows are a model: effects of kernels (such as that of block sizes) are not in them;
  [performance.md](performance.md) has measured times.
- Claims on graph capture and on sharded models need GPUs, and those on swapping a design with swap space; they have no
  row.
- Rows run on one to three seeds; the table has medians. Differences of a few percent mean nothing.
- Beams need the scores of a model and are not in these rows.
"""


def page(rows: Sequence[Mapping[str, object]]) -> str:
    """Return the page with recorded rows."""
    lines = [_HEAD.format(passed=sum(bool(row["passed"]) for row in rows), count=len(rows))]
    for row in rows:
        verdict = "pass" if row["passed"] else "**miss**"
        cells = (f"H{row['number']}", row["id"], row["claim"], row["original"], row["ours"], row["pass_line"], verdict)
        lines.append("| " + " | ".join(map(str, cells)) + " |\n")
    pictures = [f"![H{row['number']}]({row['picture']})\n" for row in rows if row.get("picture")]
    if pictures:
        lines += ["\n## Pictures\n\n", "\n".join(pictures)]
    notes = [f"- H{row['number']}: {row['why']}.\n" for row in rows if row["why"]]
    if notes:
        lines += ["\n## Notes\n\n", *map(_wrapped, notes)]
    return "".join([*lines, _TAIL])


def _wrapped(note: str) -> str:
    """Break a note into lines of at most 120 characters."""
    lines, line = [], ""
    for word in note.split():
        if len(line) + len(word) + 1 > 120:
            lines.append(line)
            line = "  " + word
        else:
            line = f"{line} {word}" if line else word
    return "\n".join([*lines, line]) + "\n"
